"""What of a run's samples is kept: all of every step, or of every N-th, within a budget of the disk."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.config.trainer import SamplesConfig
from tandem.observe.samples.parts import KINDS, Kind, cut_in, parts_in, write_part
from tandem.observe.samples.table import sample_table
from tandem.observe.samples.thinning import thinned

if TYPE_CHECKING:
    from tandem.columns.proto import DataProto

logger = logging.getLogger(__name__)

_MB = 1_000_000


class SampleStore:
    """The parts in ``output_dir/samples``.

    ``resumed_step`` is the last step that the resumed checkpoint contains: parts of later ones are dropped, since those
    steps are run again. Nothing here ends a run: a part that can't be written or removed is warned of.
    """

    def __init__(self, output_dir: Path, config: SamplesConfig, *, resumed_step: int | None = None) -> None:
        self._output_dir, self._config = output_dir, config
        self._warned = False
        try:
            stale = cut_in(output_dir)
            if resumed_step is not None:
                stale += [part.path for part in parts_in(output_dir) if part.step > resumed_step]
        except OSError as error:
            logger.warning("samples of an earlier run can't be looked at (the run goes on): %s", error)
            return
        for path in stale:
            try:
                path.unlink()
            except OSError as error:
                logger.warning("samples of steps that are run again were not removed (the run goes on): %s", error)

    def keep(self, kind: Kind, step: int, batch: DataProto) -> None:
        """Write the samples that ``step`` (counted from 1) trained on, or those of the evaluation after it."""
        every = self._config.every
        if not every or not len(batch) or (kind == "train" and step % every):
            return
        try:
            write_part(self._output_dir, kind, step, sample_table(batch, step, kind, tokens=self._config.tokens))
            self._thin()
        except Exception as error:  # Arrow has errors of its own, and none is worth a training
            logger.warning("samples of step %d were not written (the run goes on): %s", step, error)

    def _thin(self) -> None:
        """Keep to the budget: steps are thinned out before evaluations, which are fewer and smaller."""
        parts, budget = parts_in(self._output_dir), self._config.max_mb * _MB
        sizes = {part: part.path.stat().st_size for part in parts}
        for kind in KINDS:
            own = {part.step: part for part in parts if part.kind == kind}
            others = sum(size for part, size in sizes.items() if part.kind != kind)
            for step in thinned({step: sizes[part] for step, part in own.items()}, budget - others):
                self._warn(budget)
                part = own[step]
                part.path.unlink()
                del sizes[part]

    def _warn(self, budget: int) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "samples reached trainer.samples.max_mb = %d: from here on older steps are thinned out evenly, and the "
                "newest are kept",
                budget // _MB,
            )
