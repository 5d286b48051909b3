"""trackio (https://github.com/gradio-app/trackio), on this machine, or on the Space that ``TRACKIO_SPACE_ID`` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.observe.trackers.protocol import TRACKERS, RunEnd, RunInfo
from tandem.observe.trackers.service import Service, package


@TRACKERS.register("trackio", package="trackio", extra="trackio", service=True)
class TrackioTracker(Service):
    """A run of trackio, which knows runs by their names: a new one with a name that is taken gets a number."""

    name = "trackio"

    def open(self, run: RunInfo, known: str | None) -> str:
        """Open the run; its name is its id."""
        self._trackio = package("trackio")
        name = known or _free(run.name, set(package("trackio.sqlite_storage").SQLiteStorage.get_runs(run.project)))
        self._run: Any = self._trackio.init(
            project=run.project,
            name=name,
            resume="never" if known is None else "allow",
            config=dict(run.config),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        return name

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of the step."""
        self._run.log(dict(values), step=step)

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Log a histogram of each."""
        self._run.log({name: self._trackio.Histogram(list(shown)) for name, shown in values.items()}, step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table of the step."""
        self._run.log({name: self._trackio.Table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

    def ended(self, end: RunEnd) -> None:
        """Log a table of what is known, and an alert where the run did not finish: trackio has no states."""
        shown = self.summary(end)
        self.table(self._step, "summary", ("fact", "value"), [(key, str(value)) for key, value in shown.items()])
        if end.outcome != "finished":
            self._run.alert(f"the run {end.outcome}", text=end.words or None, level=self._trackio.AlertLevel.ERROR)

    def finish(self) -> None:
        """Write what is still pending."""
        self._run.finish()


def _free(name: str, taken: set[str]) -> str:
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    return found
