"""Where metrics go besides ``metrics.jsonl``. A tracker never ends a run: it fails alone, with a warning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast, runtime_checkable

from tandem.base.errors import TandemError
from tandem.base.hidden import hide, hide_in
from tandem.base.lazy import LazyModule
from tandem.base.registry import Registry
from tandem.observe.metrics import MetricLog
from tandem.observe.progress import ProgressLine

if TYPE_CHECKING:
    import numpy
else:
    numpy = LazyModule("numpy")

logger = logging.getLogger(__name__)

MAX_FAILURES = 5
"""Failures in a row after which a tracker is given up."""

T = TypeVar("T")


@dataclass(frozen=True)
class RunInfo:
    """What a tracker may know of the run. ``resumed_step`` is the last step already done, None in a new run;
    ``goes_on``: what is in ``output_dir`` is of this run. ``config`` has no secrets.
    """

    output_dir: Path
    total_steps: int | None = None
    resumed_step: int | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    goes_on: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", hide_in(self.config))


class Tracker(Protocol):
    """Shows or ships metrics. ``metrics`` values are numbers; a method may raise, which costs this tracker alone.
    ``JsonlTracker`` is the simplest one. Another becomes a name for ``trainer.logger`` so::

        @TRACKERS.register("mine")
        def mine(run: RunInfo) -> Tracker: ...
    """

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Log one step's metrics, in step order; a step may come in several calls."""

    def finish(self) -> None:
        """Note that the run ended, well or not."""


@runtime_checkable
class ShowsDistributions(Protocol):
    """A tracker that shows how values are spread, too; one without this method is not asked."""

    def distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Show the values of each name in this step, as a histogram or otherwise."""


TRACKERS: Registry[Callable[[RunInfo], Tracker]] = Registry("logger")
"""Factories by the names of ``trainer.logger``. The trait ``package`` names a module that must be importable, ``extra``
the extra of this distribution that brings it."""


@TRACKERS.register("console")
def console(run: RunInfo) -> Tracker:
    """Return the progress line on the terminal, or plain lines without one."""
    return ProgressLine(run.total_steps, first_step=run.resumed_step or 0)


@TRACKERS.register("jsonl")
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
        self._writer = SummaryWriter(run.output_dir / "tensorboard", purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Add every finite or non-finite number; what is not a number is left out."""
        for key, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Add a histogram of each."""
        for name, shown in values.items():
            self._writer.add_histogram(name, numpy.asarray(shown), step)

    def finish(self) -> None:
        """Write what is pending and close."""
        self._writer.close()


class _Guarded:
    """One tracker behind a fence: created late, created again while it fails, given up after ``MAX_FAILURES``."""

    def __init__(self, name: str, factory: Callable[[RunInfo], Tracker], run: RunInfo) -> None:
        self.name = name
        self._factory = factory
        self._run = run
        self._tracker: Tracker | None = None
        self._failures = 0
        self.attempt(lambda tracker: None)

    def attempt(self, action: Callable[[Tracker], None]) -> None:
        """Run ``action`` on the tracker, which is made if it isn't there yet; an exception is counted, not raised."""
        if self._failures >= MAX_FAILURES:
            return
        try:
            if self._tracker is None:
                self._tracker = self._factory(self._run)
            action(self._tracker)
            self._failures = 0
        except (Exception, SystemExit) as error:  # SystemExit: some tracking services exit on a bad login
            self._failures += 1
            self._warn(error)

    @property
    def shows_distributions(self) -> bool:
        """Whether it takes distributions, and took the numbers of the step."""
        return not self._failures and isinstance(self._tracker, ShowsDistributions)

    def finish(self) -> None:
        """End the tracker if it ever came up."""
        if self._tracker is not None:
            self.attempt(lambda tracker: tracker.finish())

    def _warn(self, error: BaseException) -> None:
        """Tell once that it fails and once that it is given up; the steps between stay quiet."""
        reason = hide(f"{type(error).__name__}: {error}")
        if self._failures == MAX_FAILURES:
            logger.warning("logger %r failed %d times in a row and is given up: %s", self.name, MAX_FAILURES, reason)
        elif self._failures == 1:
            logger.warning("logger %r failed and will be tried again (the run goes on): %s", self.name, reason)


class Trackers:
    """All trackers of a run behind one call; ``metrics.jsonl`` is always among them.

    Raises:
        UnknownNameError: a name that no tracker has.
    """

    def __init__(self, names: Sequence[str], run: RunInfo) -> None:
        ordered = list(dict.fromkeys(["jsonl", *names]))
        entries = [TRACKERS[name] for name in ordered]
        self._guarded = [_Guarded(entry.name, entry.target, run) for entry in entries]

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Hand one step's metrics to every tracker; never raises for a tracker's sake."""
        numbers = {key: _number(value) for key, value in metrics.items()}
        for guarded in self._guarded:
            guarded.attempt(lambda tracker: tracker.log(step, numbers))

    def distributions(self, step: int, find: Callable[[], Mapping[str, Sequence[float]]]) -> None:
        """Hand what ``find`` gives to the trackers that show distributions; it isn't called where none does."""
        asked = [guarded for guarded in self._guarded if guarded.shows_distributions]
        values = find() if asked else {}
        for guarded in asked:
            guarded.attempt(lambda tracker: cast(ShowsDistributions, tracker).distributions(step, values))

    def finish(self) -> None:
        """End every tracker; call it once, also when the run failed."""
        for guarded in self._guarded:
            guarded.finish()


def _number(value: object) -> object:
    """Return the Python number of a numpy or torch scalar; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
