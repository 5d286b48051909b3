"""Who worked and who waited: the timeline of a run (``trainer.trace``), read as it grows."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from tandem.observe.metrics import from_json

MOST_SPANS = 3000
"""The newest of them are kept: a page draws each."""
WAITING = "wait"
"""How parts are called in which nothing is done."""


class Lanes:
    """The spans of a trace as of the last look, by lane; a file that was replaced is read again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: tuple[int, int] | None = None  # device and inode
        self._read = 0  # bytes
        self._names: dict[tuple[int, int], str] = {}
        self._spans: deque[tuple[tuple[int, int], float, float, str]] = deque(maxlen=MOST_SPANS)

    def look(self) -> None:
        """Take in what was added since. A file that isn't there, or can't be read, has no spans."""
        try:
            with self.path.open("rb") as file:
                status = self.path.stat()
                known = (status.st_dev, status.st_ino)
                if self._file != known or status.st_size < self._read:
                    self._forget()
                self._file = known
                file.seek(self._read)
                added = file.read()
        except OSError:
            self._forget()
            return
        whole = added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._take(line)  # the last event of a run that goes on has no end of its line yet

    def describe(self) -> list[dict[str, Any]]:
        """Return the lanes in the order in which they began, each with ``name``, ``busy`` and ``spans``.

        A span is [begin, seconds, depth, name], its begin in seconds after the first one that is shown; one that lies
        inside another of its lane is one deeper. ``busy`` is the share of the time shown in which it did something
        else than wait.
        """
        if not self._spans:
            return []
        first = min(begin for _, begin, _, _ in self._spans)
        whole = max(begin + seconds for _, begin, seconds, _ in self._spans) - first
        lanes: dict[str, list[list[Any]]] = {}
        # Whatever encloses another begins first, or lasts longer.
        for lane, begin, seconds, name in sorted(self._spans, key=lambda span: (span[1], -span[2])):
            own = lanes.setdefault(self._names.get(lane, str(lane)), [])
            depth = _depth(own, begin - first)
            own.append([begin - first, seconds, depth, name])
        return [{"name": name, "busy": _busy(own, whole), "spans": own} for name, own in lanes.items()]

    def _forget(self) -> None:
        self._file, self._read = None, 0
        self._names.clear()
        self._spans.clear()

    def _take(self, line: bytes) -> None:
        try:
            event = from_json(line.rstrip().rstrip(b",") or b"null")
            if not isinstance(event, Mapping):
                return
            lane = (int(event["pid"]), int(event.get("tid", 0)))
            if event["ph"] == "M" and event["name"] == "thread_name":
                self._names[lane] = str(event["args"]["name"])
            elif event["ph"] == "X":
                self._spans.append((lane, float(event["ts"]) / 1e6, float(event["dur"]) / 1e6, str(event["name"])))
        except (ValueError, KeyError, TypeError):  # the brackets around it, or a line that was cut
            return


def _depth(lane: list[list[Any]], begin: float) -> int:
    """Return how many spans of ``lane`` go on at ``begin``; clocks are read in microseconds."""
    taken = {depth for start, seconds, depth, _ in lane[-50:] if start + seconds > begin + 1e-6}
    return next(depth for depth in range(len(taken) + 1) if depth not in taken)


def _busy(lane: list[list[Any]], whole: float) -> float:
    """Return the share of ``whole`` that the innermost of the spans fill which don't wait."""
    edges = sorted({edge for begin, seconds, _, _ in lane for edge in (begin, begin + seconds)})
    open_: list[list[Any]] = []
    busy, place = 0.0, 0
    for begin, end in pairwise(edges):
        while place < len(lane) and lane[place][0] <= begin:
            open_.append(lane[place])
            place += 1
        open_ = [span for span in open_ if span[0] + span[1] > begin]
        inner = max(open_, key=lambda span: span[2], default=None)
        busy += end - begin if inner is not None and not inner[3].startswith(WAITING) else 0.0
    return busy / whole if whole > 0 else 0.0
