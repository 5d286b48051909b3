"""MLflow (https://mlflow.org/docs): the server or database that ``MLFLOW_TRACKING_URI`` names, or its default."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from tandem.observe.trackers.protocol import TRACKERS, RunEnd, RunInfo
from tandem.observe.trackers.service import Service, flat, package

STATES = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
BINS = 64
_LONGEST = 6000
_AT_ONCE = 100
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]", re.ASCII)


@TRACKERS.register("mlflow", package="mlflow", extra="mlflow", service=True)
class MlflowTracker(Service):
    """A run of MLflow in the experiment ``trainer.project``; tables and histograms are artifacts of it."""

    name = "mlflow"

    def open(self, run: RunInfo, known: str | None) -> str:
        """Open the run; the config is its parameters, and whole in ``config.json``."""
        package("mlflow")
        self._entities = package("mlflow.entities")
        self._client: Any = package("mlflow").MlflowClient()
        if known is None:
            found = self._client.get_experiment_by_name(run.project)
            experiment = self._client.create_experiment(run.project) if found is None else found.experiment_id
            known = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        else:
            self._client.update_run(known, status="RUNNING")
        self._tables: list[dict[str, str]] = json.loads(
            self._client.get_run(known).data.tags.get("mlflow.loggedArtifacts", "[]")
        )
        there = self._client.get_run(known).data.params
        new = [(key, value) for key, value in flat(run.config).items() if key not in there]  # a parameter never changes
        each = iter(self._entities.Param(_name(key), value[:_LONGEST]) for key, value in new)
        while some := list(islice(each, _AT_ONCE)):
            self._client.log_batch(known, params=some)
        self._client.log_dict(known, dict(run.config), "config.json")
        self._opened = known
        return known

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Log them; a name has ``_at_`` where MLflow takes no ``@``."""
        now = int(time.time() * 1000)
        each = iter(self._entities.Metric(_name(key), value, now, step) for key, value in values.items())
        while some := list(islice(each, _AT_ONCE)):
            self._client.log_batch(self._opened, metrics=some)

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Write a file for each: the counts, and the edges around them."""
        numpy = package("numpy")
        for name, shown in values.items():
            counts, edges = numpy.histogram(shown, bins=BINS)
            document = {"counts": counts.tolist(), "edges": edges.tolist()}
            self._client.log_dict(self._opened, document, f"{_name(name)}/step_{step:08d}.json")

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write a table as MLflow keeps them, in a file for each step."""
        path = f"{name}/step_{step:08d}.json"
        self._client.log_dict(self._opened, {"columns": list(columns), "data": [list(row) for row in rows]}, path)
        self._tables = [*self._tables, {"path": path, "type": "table"}][-_AT_ONCE:]  # a tag has an end
        self._client.set_tag(self._opened, "mlflow.loggedArtifacts", json.dumps(self._tables))

    def ended(self, end: RunEnd) -> None:
        """Put what is known into tags, and set the state."""
        for key, value in self.summary(end).items():
            self._client.set_tag(self._opened, _name(f"tandem.{key}"), str(value)[:_LONGEST])
        self._client.set_terminated(self._opened, STATES[end.outcome])

    def finish(self) -> None:
        """Do nothing: each thing was sent when it was told."""


def _name(key: str) -> str:
    return _NOT_IN_NAMES.sub("_", key.replace("@", "_at_"))
