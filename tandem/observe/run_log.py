"""One handle for all that a run reports: metrics, samples, times, the closing report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tandem.base.hidden import hide_in
from tandem.base.run_folder import TRACE_FILE, begin
from tandem.config.trainer import SamplesConfig
from tandem.observe.about import note_begin, note_end, outcome_of
from tandem.observe.machine import MachineUse
from tandem.observe.metrics import RolloutLog, RolloutRecord
from tandem.observe.report import write_report
from tandem.observe.samples.parts import Kind
from tandem.observe.samples.store import SampleStore
from tandem.observe.timeline import Stopwatch, Trace
from tandem.observe.trackers import RunEnd, RunInfo, Trackers

if TYPE_CHECKING:
    from tandem.columns.proto import DataProto

logger = logging.getLogger(__name__)

Listener = Callable[[int, Mapping[str, object]], object]
"""A function of the user's program, called with a step and its metrics."""


class RunLog:
    """The log of a run, a context around its loop: whatever ends it, files are closed and a report is written.

    Nothing here ends a run: a tracker, the samples' file or the report may fail, each with a warning. ``loggers`` are
    the names of ``trainer.logger``; ``trace`` writes ``trace.json`` into the output folder; ``samples`` says which
    samples are kept (None: the run has none).

    Raises:
        UnknownNameError: a logger that isn't registered.
        ConfigError: the output folder holds files that no run wrote.
        WriteError: the output folder can't be made.
    """

    def __init__(
        self, run: RunInfo, loggers: Sequence[str] = (), *, trace: bool = False, samples: SamplesConfig | None = None
    ) -> None:
        for moved in begin(run.output_dir, goes_on_after=run.resumed_step if run.goes_on else None, to=run.total_steps):
            print(moved)
        self._run = run
        self._noted(lambda: note_begin(run.output_dir, run.resumed_step if run.goes_on else None))
        self._trackers = Trackers(loggers, run)
        self._rollouts = RolloutLog(run.output_dir, resumed_step=run.resumed_step)
        kept = SamplesConfig(every=0) if samples is None else samples
        self._samples = SampleStore(run.output_dir, kept, resumed_step=run.resumed_step)
        self._trace = Trace(run.output_dir / TRACE_FILE) if trace else None
        self._stopwatch = Stopwatch(self._trace)
        self._summary: dict[str, object] = {}
        self._listeners: list[Listener] = []
        self._machine = MachineUse(run.output_dir)

    def listen(self, listeners: Sequence[Listener]) -> None:
        """Call each of these with every step that is logged from here on; what one raises passes through."""
        self._listeners += listeners

    def timed(self, part: str) -> AbstractContextManager[None]:
        """Count what happens inside under ``time/PART`` and ``cpu/PART`` of the next logged step."""
        return self._stopwatch.timed(part)

    def doing(self) -> list[tuple[str, float]]:
        """Return the timed parts that go on at this moment, and for how many seconds so far."""
        return self._stopwatch.open_parts()

    def drain(self) -> dict[str, float]:
        """Return the times since the last look, for whoever computes with them before they are logged."""
        return self._stopwatch.drain()

    def span(self, name: str, begun: float, ended: float, lane: str) -> None:
        """Add something that went on between two readings of ``time.perf_counter``, for the timeline only."""
        if self._trace is not None:
            self._trace.add(name, round(begun * 1e9), round(ended * 1e9), lane)

    def log(
        self, step: int, metrics: Mapping[str, object], rollouts: Sequence[RolloutRecord] = (), *, times: bool = True
    ) -> None:
        """Log one step: its metrics, with times and the machine's use unless ``times`` is off, and a few samples."""
        shown = {**metrics, **self._stopwatch.drain(), **self._machine.measure()} if times else metrics
        self._trackers.log(step, shown)
        self._trackers.samples(step, [vars(replace(record, images=None)) for record in rollouts])
        try:
            self._rollouts.record(step, list(rollouts))
        except OSError as error:
            logger.warning("samples of step %d were not written (the run goes on): %s", step, error)
        for listener in self._listeners:
            listener(step, dict(shown))

    def keep_samples(self, kind: Kind, step: int, batch: DataProto) -> None:
        """Keep all samples that ``step`` trained on, or those of the evaluation after it, where the config says so."""
        with self.timed("samples"):
            self._samples.keep(kind, step, batch)

    def distributions(self, step: int, find: Callable[[], Mapping[str, Sequence[float]]]) -> None:
        """Show how values of the step are spread where a tracker does; ``find`` is asked for them only then."""
        self._trackers.distributions(step, find)

    def settle(self) -> None:
        """Wait until what was handed over is on the disk, for whoever writes a checkpoint: it is not done again."""
        self._samples.settle()

    def summarize(self, **facts: object) -> None:
        """Take facts for the head of the report, such as the model's folder; later ones replace earlier ones."""
        self._summary.update(hide_in(facts))

    def close(self, error: BaseException | None = None) -> Path | None:
        """End trackers and files, write the report; its path, or None if it could not be written.

        ``error`` is what has ended the run.
        """
        self._samples.settle()
        self._trackers.finish(RunEnd(*outcome_of(error), dict(self._summary)))
        self._rollouts.close()
        if self._trace is not None:
            self._trace.close()
        try:
            return write_report(self._run.output_dir, config=self._run.config, summary=self._summary)
        except Exception as error:  # a page must not turn a finished training into a failed one
            logger.warning("report.html was not written: %s: %s", type(error).__name__, error)
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.summarize(ended_by=f"{type(error).__name__}: {error}")
        self.close(error)
        self._noted(lambda: note_end(self._run.output_dir, error))

    @staticmethod
    def _noted(note: Callable[[], None]) -> None:
        """Note what those who look at the run want to know; failing in that must not end it."""
        try:
            note()
        except OSError as error:
            logger.warning("about.json was not written (the run goes on): %s", error)
