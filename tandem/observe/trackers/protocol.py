"""What a tracker is: what it is told of a run, and the registry of their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from tandem.base.hidden import hide_in
from tandem.base.registry import Registry

PROJECT = "tandem"
"""Under which services show a run, unless ``trainer.project`` says otherwise."""


@dataclass(frozen=True)
class RunInfo:
    """What a tracker may know of the run. ``resumed_step`` is the last step already done, None in a new run;
    ``goes_on``: what is in ``output_dir`` is of this run. ``config`` has no secrets. ``project`` and ``name`` are what
    services show it under; without a ``name`` it is that of the folder.
    """

    output_dir: Path
    total_steps: int | None = None
    resumed_step: int | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    goes_on: bool = False
    project: str = PROJECT
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", hide_in(self.config))
        object.__setattr__(self, "name", self.name or self.output_dir.resolve().name)


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: ``words`` say why it did not finish. ``summary``: what is known at its end. None has secrets."""

    outcome: Literal["finished", "failed", "interrupted"] = "finished"
    words: str = ""
    summary: Mapping[str, object] = field(default_factory=dict)


class Tracker(Protocol):
    """Shows or ships metrics. ``metrics`` values are numbers; a method may raise, which costs this tracker alone.
    ``JsonlTracker`` is the simplest one. All its methods are called by one thread of its own, in their order; the run
    doesn't wait for them. Another becomes a name for ``trainer.logger`` so::

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


@runtime_checkable
class ShowsSamples(Protocol):
    """A tracker that shows samples, too; one without this method is not asked."""

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Show a few samples of this step, all with the same keys: prompt, response, reward (None: not scored) ..."""


@runtime_checkable
class NotesEnd(Protocol):
    """A tracker that is told how the run ended, before ``finish``."""

    def ended(self, end: RunEnd) -> None:
        """Note how it ended, and what is known of it now."""


TRACKERS: Registry[Callable[[RunInfo], Tracker]] = Registry("logger")
"""Factories by the names of ``trainer.logger``. The trait ``package`` names a module that must be importable, ``extra``
the extra of this distribution that brings it. ``inline``: called by the run's own thread. ``service``: it shows
``project`` and ``name``."""
