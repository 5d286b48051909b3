"""Files of samples as the page reads them: whatever stands in one, it ends no answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from tandem.observe.samples.parts import Kind, Part, parts_in
from tandem.observe.samples.table import SCHEMA

_LATER = ("inserted",)  # columns that runs of earlier versions have not written


@dataclass(frozen=True, order=True)
class File:
    """A part as it was when it was looked at: another run's of the same name has another ``stamp``."""

    part: Part
    stamp: tuple[int, int, int]  # inode, time of the last change in ns, bytes


class UnreadableError(Exception):
    """A file of samples is gone, cut, or not as runs write it; in words."""


def files_in(folder: Path) -> list[File]:
    """List the files of samples of the run in ``folder`` by kind and step. Raises ``UnreadableError``."""
    found: list[File] = []
    try:
        parts = parts_in(folder)
    except OSError as error:
        raise UnreadableError(f"samples ({error.strerror})") from error
    for part in parts:
        try:
            status = part.path.stat()
        except OSError:  # thinned out meanwhile
            continue
        found.append(File(part, (status.st_ino, status.st_mtime_ns, status.st_size)))
    return found


def of_kind(files: Sequence[File], kind: Kind) -> list[File]:
    """Return those of one kind."""
    return [file for file in files if file.part.kind == kind]


def read(file: File, names: Sequence[str] | None = None) -> pa.Table:
    """Return the columns ``names`` of a file, or all. Raises ``UnreadableError`` where it has not what runs write."""
    path = file.part.path
    try:
        with pq.ParquetFile(path) as opened:
            there = opened.schema_arrow
            for name in [name for name in SCHEMA.names if name not in _LATER] if names is None else names:
                if name not in there.names or there.field(name).type != SCHEMA.field(name).type:
                    raise UnreadableError(f"{path.name} (its column {name} is missing, or of another type)")
            return opened.read(columns=None if names is None else list(names))
    except (OSError, pa.ArrowException) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnreadableError(f"{path.name} ({said})") from error
