"""What trackers of services have in common: one run there for all parts of a run here, and nothing told twice."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from tandem.base.errors import TandemError
from tandem.base.run_folder import TRACKERS_FOLDER
from tandem.observe.metrics import from_json
from tandem.observe.trackers.protocol import RunEnd, RunInfo

COLUMNS = ("step", "prompt", "response", "reward", "ground_truth", "version")
"""Of a table of samples."""


class Service(ABC):
    """A tracker of a service. A note in the run's folder says which run of the service it is, and the last step that
    it was told; where the run goes on, it does there too, and steps that are run again keep their first numbers, since
    a service takes none back.
    """

    name: ClassVar[str]

    def __init__(self, run: RunInfo) -> None:
        self.folder = run.output_dir / TRACKERS_FOLDER
        self._note = self.folder / f"{self.name}.json"
        noted = _read(self._note) if run.goes_on else {}
        step = noted.get("step")
        self._last_step = step if isinstance(step, int) else -1
        self._step = max(self._last_step, 0)
        found = noted.get("id")
        self._id = self.open(run, found if isinstance(found, str) else None)
        self._write()

    @abstractmethod
    def open(self, run: RunInfo, known: str | None) -> str:
        """Open the run ``known`` of the service again, or a new one (None); return its id."""

    @abstractmethod
    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Tell numbers of a step."""

    @abstractmethod
    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Tell how the values of each name are spread."""

    @abstractmethod
    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Tell a table; its values are numbers, texts and None."""

    @abstractmethod
    def ended(self, end: RunEnd) -> None:
        """Note how the run ended."""

    @abstractmethod
    def finish(self) -> None:
        """Send what is pending, and close."""

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Tell the numbers of a step that the service doesn't know yet."""
        if step <= self._last_step:
            return
        found = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
        self.numbers(step, found)
        self._step = step
        self._write()

    def distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Tell how values of a step are spread."""
        if step > self._last_step:
            self.histograms(step, values)

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Tell a table of samples."""
        if step > self._last_step:
            cells = [[step, *(_cell(row.get(name)) for name in COLUMNS[1:])] for row in rows]
            self.table(step, "samples", COLUMNS, cells)

    def summary(self, end: RunEnd) -> dict[str, Any]:
        """Return what is known at the end, as numbers and texts."""
        found = {"state": end.outcome, "reason": end.words, **end.summary}
        return {name: _cell(value) for name, value in found.items() if value not in ("", None)}

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        beside = self._note.with_suffix(".new")
        beside.write_text(json.dumps({"id": self._id, "step": self._step}), "utf-8")
        os.replace(beside, self._note)


def package(name: str) -> Any:
    """Return the service's own package. Raises ``TandemError`` that names the extra where it isn't installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise TandemError(f"{name} is not installed: run `pip install 'tandem-rl[{name}]'` ({error})") from error


def flat(document: Mapping[str, object], before: str = "") -> dict[str, str]:
    """Return the leaves of a document by their dotted keys, as text."""
    found: dict[str, str] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found


def _cell(value: object) -> float | str | None:
    if value is None or isinstance(value, int | float | str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = from_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
