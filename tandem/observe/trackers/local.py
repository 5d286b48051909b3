"""Trackers that write to the terminal or into the run's folder, by what Tandem or torch brings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tandem.base.errors import TandemError
from tandem.base.lazy import LazyModule
from tandem.base.run_folder import TENSORBOARD
from tandem.observe.metrics import MetricLog, to_json
from tandem.observe.progress import ProgressLine
from tandem.observe.trackers.protocol import TRACKERS, RunEnd, RunInfo, Tracker

if TYPE_CHECKING:
    import numpy
else:
    numpy = LazyModule("numpy")


@TRACKERS.register("console", inline=True)
def console(run: RunInfo) -> Tracker:
    """Return the progress line on the terminal, or plain lines without one."""
    return ProgressLine(run.total_steps, first_step=run.resumed_step or 0)


@TRACKERS.register("jsonl", inline=True)
class JsonlTracker:
    """``metrics.jsonl``: every run has one, named or not."""

    def __init__(self, run: RunInfo) -> None:
        self._log = MetricLog(run.output_dir, resumed_step=run.resumed_step)

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Append one line with ``step`` and its metrics."""
        self._log.append(step, metrics)

    def finish(self) -> None:
        """Close the file; nothing is logged afterwards."""
        self._log.close()


@TRACKERS.register("tensorboard", package="tensorboard", extra="tracking")
class TensorBoardTracker:
    """A tracker that writes scalars for TensorBoard into ``output_dir/tensorboard``."""

    def __init__(self, run: RunInfo) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TandemError("tensorboard is not installed: run `pip install 'tandem-rl[tracking]'`") from error
        # Events of steps after the resumed one are hidden: those steps are run again.
        purge = None if run.resumed_step is None else run.resumed_step + 1
        self._writer = SummaryWriter(run.output_dir / TENSORBOARD, purge_step=purge)
        self._step = run.resumed_step or 0
        if run.config:
            self._writer.add_text("config", _as_code(run.config), self._step)

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Add every finite or non-finite number; what is not a number is left out."""
        for key, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(key, value, step)
        self._step = step
        self._writer.flush()

    def distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Add a histogram of each."""
        for name, shown in values.items():
            self._writer.add_histogram(name, numpy.asarray(shown), step)

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Add them as text, as they stand in ``rollouts.jsonl``."""
        self._writer.add_text("samples", "\n\n".join(map(_as_code, rows)), step)

    def ended(self, end: RunEnd) -> None:
        """Add how it ended as text."""
        self._writer.add_text("end", _as_code({"outcome": end.outcome, "words": end.words, **end.summary}), self._step)

    def finish(self) -> None:
        """Write what is pending and close."""
        self._writer.close()


def _as_code(value: Mapping[str, object]) -> str:
    """Return a document as an indented block, which TensorBoard shows as it stands."""
    text = json.dumps(to_json(value), ensure_ascii=False, indent=1)
    return "\n".join(f"    {line}" for line in text.splitlines())
