"""A file of JSON lines that grows: each look reads only what was added."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.observe.metrics import Row


class Tail:
    """The rows of ``path`` as of the last look.

    ``generation`` counts how often the file was replaced or cut, as a resume does: rows are read again then. A last
    line without its end is left for the next look.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.generation = 0
        self._file: tuple[int, int] | None = None  # device and inode
        self._read = 0  # bytes

    def look(self) -> bool:
        """Take in what was added since; return whether anything was."""
        try:
            with self.path.open("rb") as file:
                status = self.path.stat()
                known = (status.st_dev, status.st_ino)
                if self._file not in (None, known) or status.st_size < self._read:
                    self.rows, self._read = [], 0
                    self.generation += 1
                self._file = known
                if status.st_size == self._read:
                    return False
                file.seek(self._read)
                added = file.read()
        except FileNotFoundError:
            return False
        whole = added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        self.rows += [row for line in whole.splitlines() if (row := _row(line)) is not None]
        return bool(whole)


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
