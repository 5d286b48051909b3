"""How far a run is, and what a part of it does around each step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.observe.metrics import RolloutRecord
from tandem.observe.status.status import Status
from tandem.session.idle import IdleSteps
from tandem.session.keep.rescue import Rescue


@dataclass
class Progress:
    """``step`` is the next one and equals the weights version, ``last`` the one after the last.

    ``began`` is the first that this run does, or what was done when it was resumed. ``seconds``, ``executed`` (stages)
    and ``trained`` (batch, metrics of the update) are of the step before. ``over``: the run ends before ``last``.
    ``samples`` reports at the end of a run where all of them went. ``facts`` are what a run that goes on from here must
    know, as of the end of the last step; ``recorded``: that step is in the log; ``started``: when it began. ``idle``
    counts the steps that trained nothing.
    """

    step: int
    last: int
    began: int = 0
    seconds: float = 0.0
    executed: list[str] = field(default_factory=list)
    trained: tuple[Any, dict[str, float]] | None = None
    over: bool = False
    samples: str = ""
    facts: dict[str, Any] | None = None
    started: float = 0.0
    recorded: bool = True
    idle: IdleSteps = field(default_factory=IdleSteps)


class StepPart:
    """A part of a run, as ``Run`` sees it: nothing, unless it says otherwise."""

    def running(self) -> AbstractContextManager[None]:
        """Return a context around the whole loop."""
        return nullcontext()

    def end_step(self, step: int) -> None:
        """Note that the update of ``step`` is done, and nobody has the new weights yet."""

    def metrics(self, batch: Any, step: int) -> dict[str, float]:
        """Return what the finished step reports of the batch that was trained on."""
        del batch, step
        return {}

    def times(self, step: int) -> dict[str, float]:
        """Return the seconds of what went on beside the loop, and other facts of the step that are no times of the
        log's.
        """
        del step
        return {}

    def records(self, batch: Any, step: int) -> Sequence[RolloutRecord]:
        """Return the samples of the step that a person may want to read."""
        del batch, step
        return ()

    def logged(self, batch: Any, step: int) -> None:
        """Do what is due once the line of the finished step is written."""

    def facts(self, step: int) -> dict[str, Any]:
        """Return what a run that is resumed after so many steps must know."""
        del step
        return {}

    def save(self, root: Path, step: int) -> dict[str, Path]:
        """Write folders under ``root`` that belong into the checkpoint of ``step``, by name."""
        del root, step
        return {}

    def finish(self, folder: Path) -> None:
        """Leave things of the run, which is at its end, in ``folder``."""

    def report_status(self, status: Status) -> None:
        """Add to ``status`` what somebody who asks the running run should know. Called in any thread, at any time."""

    def rescue(self, folder: Path) -> Rescue | None:
        """Return what keeps its weights where the run in ``folder`` ends because the trained model can't be written."""
        del folder
        return None

    def summary(self) -> dict[str, str]:
        """Return what is printed at the end of the run, also of one that failed."""
        return {}
