"""What of a run's samples is kept: all of every step, or of every N-th, within a budget of the disk."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.config.trainer import SamplesConfig
from tandem.observe.background import Background
from tandem.observe.samples.parts import KINDS, Kind, Part, cut_in, parts_in, write_part
from tandem.observe.samples.table import sample_table, shown_columns
from tandem.observe.samples.thinning import thinned

if TYPE_CHECKING:
    from tandem.columns.proto import DataProto

logger = logging.getLogger(__name__)

_MB = 1_000_000
_STEPS_AHEAD = 2
_PATIENCE_S = 60.0
"""How long a step, a checkpoint or the end waits for a disk that takes nothing."""


class SampleStore:
    """The parts in ``output_dir/samples``, written beside the loop.

    ``resumed_step`` is the last step that the resumed checkpoint contains: parts of later ones are dropped, since those
    steps are run again. Nothing here ends a run: a part that can't be written or removed is warned of.
    """

    def __init__(self, output_dir: Path, config: SamplesConfig, *, resumed_step: int | None = None) -> None:
        self._output_dir, self._config = output_dir, config
        self._writer = Background("samples", _STEPS_AHEAD)
        self._sizes: dict[Part, int] = {}
        self._warned = False
        try:
            stale = cut_in(output_dir)
            for part in parts_in(output_dir):
                if resumed_step is not None and part.step > resumed_step:
                    stale.append(part.path)
                else:
                    self._sizes[part] = part.path.stat().st_size
        except OSError as error:
            logger.warning("samples of an earlier run can't be looked at (the run goes on): %s", error)
            return
        for path in stale:
            try:
                path.unlink()
            except OSError as error:
                logger.warning("samples of steps that are run again were not removed (the run goes on): %s", error)

    def keep(self, kind: Kind, step: int, batch: DataProto) -> None:
        """Take the samples that ``step`` (counted from 1) trained on, or those of the evaluation after it.

        They are written while the run goes on, so the columns of ``batch`` must stay as they are. Where the disk is
        slower than the steps the loop waits for it; samples that it hasn't taken by then are left out.
        """
        every = self._config.every
        if not every or not len(batch) or (kind == "train" and step % every):
            return
        kept = batch.select(*(name for name in shown_columns(self._config.tokens) if name in batch.columns))
        if not self._writer.give(lambda: self._write(kind, step, kept), _PATIENCE_S):
            said = "samples of step %d were not written (the run goes on): %s has taken nothing for %d s"
            logger.warning(said, step, self._output_dir, _PATIENCE_S)

    def settle(self) -> None:
        """Wait until all that was taken is on the disk: before what a resume begins at, and before the end."""
        if not self._writer.settle(_PATIENCE_S):
            said = "the last samples are not written yet (the run goes on): %s has taken nothing for %d s"
            logger.warning(said, self._output_dir, _PATIENCE_S)

    def _write(self, kind: Kind, step: int, batch: DataProto) -> None:
        try:
            table = sample_table(batch, step, kind, tokens=self._config.tokens)
            part, size = write_part(self._output_dir, kind, step, table)
            self._sizes[part] = size
            self._thin()
        except Exception as error:  # Arrow has errors of its own, and none is worth a training
            logger.warning("samples of step %d were not written (the run goes on): %s", step, error)

    def _thin(self) -> None:
        """Keep to the budget: steps are thinned out before evaluations, which are fewer and smaller."""
        sizes, budget = self._sizes, self._config.max_mb * _MB
        if sum(sizes.values()) <= budget:
            return
        for kind in KINDS:
            own = {part.step: part for part in sizes if part.kind == kind}
            others = sum(size for part, size in sizes.items() if part.kind != kind)
            for step in thinned({step: sizes[part] for step, part in own.items()}, budget - others):
                self._warn(budget)
                part = own[step]
                part.path.unlink(missing_ok=True)
                del sizes[part]

    def _warn(self, budget: int) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "samples reached trainer.samples.max_mb = %d: from here on older steps are thinned out evenly, and the "
                "newest are kept",
                budget // _MB,
            )
