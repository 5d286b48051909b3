"""SwanLab (https://docs.swanlab.cn), in the mode that ``SWANLAB_MODE`` says: online, local or offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.observe.trackers.protocol import TRACKERS, RunEnd, RunInfo
from tandem.observe.trackers.service import Service, package

STATES = {"finished": "success", "failed": "crashed", "interrupted": "aborted"}
BINS = 32


@TRACKERS.register("swanlab", package="swanlab", extra="swanlab", service=True)
class SwanlabTracker(Service):
    """An experiment of SwanLab. Offline each part of a run that goes on has a folder, all of the same experiment:
    ``swanlab sync`` of them makes one.

    What SwanLab would find out by itself is not sent: command line, repository, output of the process.
    """

    name = "swanlab"

    def open(self, run: RunInfo, known: str | None) -> str:
        """Open the experiment, without asking on the terminal for a key."""
        self._swanlab = package("swanlab")
        kinds, folder = self._swanlab.Settings, self.folder / self.name
        folder.mkdir(parents=True, exist_ok=True)
        quiet = kinds.Probe(hardware=False, runtime=False, requirements=False, git=False, monitor=False)
        settings = kinds(interactive=False, probe=quiet, terminal=kinds.Terminal(proxy_type="none"))
        self._run: Any = self._swanlab.init(
            project=run.project,
            name=run.name,
            id=known,
            resume="allow",
            log_dir=str(folder),
            config=dict(run.config),
            settings=settings,
        )
        self._end = RunEnd()
        return str(self._run.id)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of the step."""
        self._run.log(dict(values), step=step)

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Log a bar chart of each: SwanLab has no histograms of its own."""
        numpy = package("numpy")
        for name, shown in values.items():
            counts, edges = numpy.histogram(shown, bins=BINS)
            chart = self._swanlab.echarts.Bar()
            chart.add_xaxis([f"{edge:.4g}" for edge in edges[:-1].tolist()])
            chart.add_yaxis("count", counts.tolist())
            self._run.log({name: chart}, step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table of the step."""
        shown = self._swanlab.echarts.Table()
        shown.add(list(columns), [list(row) for row in rows])
        self._run.log({name: shown}, step=step)

    def ended(self, end: RunEnd) -> None:
        """Log a table of what is known."""
        shown = self.summary(end)
        self.table(self._step, "summary", ("fact", "value"), [(key, str(value)) for key, value in shown.items()])
        self._end = end

    def finish(self) -> None:
        """Send what is pending, and set the state."""
        state = STATES[self._end.outcome]
        self._run.finish(state=state, error=self._end.words or None if state == "crashed" else None)
