"""Run folders as the page shows them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tandem.base.errors import DataError, TandemError
from tandem.base.hidden import hide_in
from tandem.base.run_folder import ABOUT_FILE, CONFIG_FILE, METRICS_FILE, TRACE_FILE
from tandem.observe.about import read_about, starts_in, state_of
from tandem.observe.metrics import Row, to_json
from tandem.observe.status.channel import ask
from tandem.observe.status.status import Status
from tandem.view.lanes import Lanes
from tandem.view.samples import SampleIndex
from tandem.view.tail import Tail

MOST_POINTS = 4000
"""Points of a curve that a page is sent; of a longer one, evenly spaced."""

_ANSWER_S = 1.0  # for a running run to say how it stands
_SIGNS = (METRICS_FILE, ABOUT_FILE)
"""What only runs write: a ``config.yaml`` may be anybody's."""


class RunFolder:
    """One run: its curves, its samples, and what it says of itself."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.metrics = Tail(path / METRICS_FILE)
        self.samples = SampleIndex(path)
        self._lanes = Lanes(path / TRACE_FILE)
        self._lock = threading.Lock()

    def look(self) -> None:
        """Take in what the run has logged since."""
        with self._lock:
            self.metrics.look()

    def config(self) -> dict[str, Any]:
        """Return the config as it ran, flat: ``{"trainer.seed": 0, ...}``; nothing where it can't be read."""
        try:
            found = yaml.safe_load((self.path / CONFIG_FILE).read_text("utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return {key: to_json(value) for key, value in _flat(hide_in(found))} if isinstance(found, dict) else {}

    def describe(self) -> dict[str, Any]:
        """Return what the list of runs shows of this one."""
        about = read_about(self.path)
        state = state_of(self.path, about)
        now = self._now() if state.kind == "running" else ""
        rows, unread = self.metrics.rows, [f"can't be read: {what}" for what in self.left_out()]
        return {
            "name": self.name,
            "path": str(self.path),
            "state": state.kind,
            "words": "; ".join(filter(None, [state.words, now, *unread])),
            "starts": starts_in(about),
            "config": self.config(),
            "step": rows[-1]["step"] if rows else 0,
            "last": last_values(rows),
            "samples": self.samples.steps(),
        }

    def _now(self) -> str:
        """Return what the running run says of itself; nothing where it says nothing."""
        with suppress(TandemError):
            return Status.of_json(ask(self.path, "status", seconds=_ANSWER_S)).now
        return ""

    def nothing_but(self, words: str) -> dict[str, Any]:
        """Return such a description of a run of which nothing can be shown, for the reason in ``words``."""
        blank = {"starts": [], "config": {}, "step": 0, "last": {}, "samples": {}}
        return {"name": self.name, "path": str(self.path), "state": "unknown", "words": words, **blank}

    def left_out(self) -> list[str]:
        """Return the files that can't be read, as far as they were looked at, and why."""
        return [*([self.metrics.trouble] if self.metrics.trouble else []), *self.samples.left_out()]

    def timeline(self) -> list[dict[str, Any]]:
        """Return who worked and who waited, newest spans of each lane; nothing where the run keeps no trace."""
        with self._lock:
            self._lanes.look()
            return self._lanes.describe()

    def curves(self, after: int = 0, generation: int | None = None) -> dict[str, Any]:
        """Return the rows of ``metrics.jsonl`` after the first ``after``, by key; all where ``generation`` is another.

        A step that has several lines is one point: later values replace earlier ones, where the page joins them.
        """
        with self._lock:
            first = after if generation == self.metrics.generation else 0
            rows, total = self.metrics.rows[first:], len(self.metrics.rows)
            shown = spaced(rows, MOST_POINTS)
            return {
                "run": self.name,
                "generation": self.metrics.generation,
                "first": first,
                "rows": total,
                "thinned": len(shown) < len(rows),
                "columns": columns(shown),
            }


def find_runs(paths: Sequence[Path]) -> dict[str, RunFolder]:
    """Return the runs that ``paths`` are or hold, by name. Raises ``DataError`` for a path without any."""
    found: dict[Path, None] = {}
    for path in paths:
        own = list(_runs_under(path))
        if not own:
            raise DataError(
                f"{path}: no run is there ({' and '.join(_SIGNS)} are missing). Name a run's folder, or one of runs"
            )
        found |= dict.fromkeys(own)
    names = _short_names(list(found))
    return {name: RunFolder(name, path) for name, path in zip(names, found, strict=True)}


def _runs_under(path: Path) -> Iterable[Path]:
    if not path.is_dir():
        return
    places = [path] if _is_run(path) else filter(_is_run, sorted(path.iterdir()))
    for place in places:
        yield place.resolve()


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in _SIGNS)


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of each path, as many as tell all apart."""
    for count in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return numbers by key, None where a row has none; ``step`` is always there."""
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if _is_number(value))
    keys["step"] = None
    return {key: [value if _is_number(value := row.get(key)) else None for row in rows] for key in keys}


def last_values(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the newest number of each key."""
    found: dict[str, Any] = {}
    for row in rows[-200:]:
        found |= {key: value for key, value in row.items() if _is_number(value)}
    return found


def spaced(rows: Sequence[Row], most: int) -> Sequence[Row]:
    """Return at most ``most`` of the rows, evenly spaced, the last one among them."""
    if len(rows) <= most:
        return rows
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _flat(value: Any, key: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flat(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
