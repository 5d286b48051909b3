"""Tables of rows on disk: JSON lines, and what comes by way of Arrow; several files, in order or one row at a time.

A table is scanned once in order and, where the data stay on disk, read again row by row in any order. Both ways give
the same rows. Memory does not grow with the size of the rows: JSON lines keep 8 bytes a line (where each starts);
what has no cheap access to one row, parquet or a compressed file, is first copied to an anonymous temporary file.
"""

from __future__ import annotations

import io
import json
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tandem.base.errors import DataError
from tandem.base.lazy import LazyModule
from tandem.base.regular import irregular
from tandem.data.arrow import SPLITS, STATE, ArrowTable, arrow_batches, csv_batches, parquet_batches, saved_batches
from tandem.data.rows import Row, RowError, Table

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped]
else:
    pyarrow = LazyModule("pyarrow")

COMPRESSED = (".gz", ".zst")
LINES = (".jsonl", ".ndjson", ".json")
"""Endings of JSON lines."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonlTable:
    """A file of one JSON object per line, UTF-8, plain or compressed (``.gz``, ``.zst``). Blank lines are skipped but
    counted in the numbers. A compressed one is read by row from a temporary copy in ``spool_dir``.
    """

    def __init__(self, path: Path, *, spool_dir: Path | None = None) -> None:
        self.name = str(path)
        self._path, self._spool_dir = path, spool_dir
        self._compressed = path.suffix.lower() in COMPRESSED

    def scan(self) -> Iterator[Row | RowError]:
        """Yield every row in the order of the file; a ``RowError`` in the place of a line that can't be used."""
        for number, line in enumerate(self._lines(), start=1):
            if line.strip():
                try:
                    yield self._parse(number, line)
                except RowError as error:
                    yield error

    def row(self, number: int) -> Row:
        """Return the row on line ``number``."""
        with nullcontext(self._copy) if self._compressed else self._path.open("rb") as handle:
            handle.seek(self._starts[number - 1])
            return self._parse(number, handle.readline())

    @cached_property
    def _starts(self) -> array[int]:
        """Byte offset of each line."""
        starts, offset = array("q"), 0
        for line in self._lines():
            starts.append(offset)
            offset += len(line)
        return starts

    @cached_property
    def _copy(self) -> IO[bytes]:
        handle: IO[bytes] = tempfile.TemporaryFile(dir=self._spool_dir)  # noqa: SIM115  # lives as long as self
        weakref.finalize(self, handle.close)
        handle.writelines(self._lines())
        return handle

    def _lines(self) -> Iterator[bytes]:
        if not self._compressed:
            with self._path.open("rb") as handle:
                yield from handle
            return
        try:
            with pyarrow.input_stream(str(self._path), compression="detect") as source:
                yield from io.BufferedReader(source)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self.name}: can't be read as {self._path.suffix} ({error})") from error

    def _parse(self, number: int, line: bytes) -> Row:
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        try:
            values = json.loads(line.decode("utf-8"), object_pairs_hook=_mapping)
        except UnicodeDecodeError as error:
            detail = (
                f"not UTF-8 at byte {error.start + 1} of the line (0x{line[error.start]:02x}): save the file as UTF-8"
            )
            raise RowError(self.name, number, "not utf-8", detail) from None
        except json.JSONDecodeError as error:
            detail = f"invalid JSON at column {error.colno}: {error.msg}. Each line holds one whole JSON object"
            raise RowError(self.name, number, "invalid json", detail) from None
        except _TwiceError as error:
            detail = f"the key {error.args[0]!r} stands twice in one object: keep the one that is meant"
            raise RowError(self.name, number, "invalid json", detail) from None
        except ValueError as error:  # a number of more digits than Python reads
            detail = f"{str(error).partition(';')[0]}: write such a number as text"
            raise RowError(self.name, number, "invalid json", detail) from None
        except RecursionError:
            raise RowError(self.name, number, "invalid json", "JSON nested too deeply") from None
        if not isinstance(values, dict):
            detail = f'a JSON {type(values).__name__}, not an object: each line holds one object like {{"prompt": …}}'
            raise RowError(self.name, number, "invalid json", detail)
        return Row(self.name, number, values)


class _TwiceError(Exception):
    """A key of a JSON object that has it already."""


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of ``pairs``; of two with one key Python would silently keep the last."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return values


def open_tables(files: Sequence[str | Path], *, spool_dir: Path | None = None, keep_nulls: bool = False) -> list[Table]:
    """Return the tables of ``files`` in the order given. Raises ``DataError`` for a missing file, a folder, another
    format.

    ``keep_nulls``: see ``ArrowTable``; a null in JSON lines was written and always stays.
    """
    if not files:
        raise DataError("no data file named: list at least one .parquet or .jsonl file")
    for file in files:
        if "://" in str(file):
            raise DataError(f"{file}: is an address, and rows are read from files. Download it first")
    return [_open_table(Path(file).expanduser(), spool_dir, keep_nulls) for file in files]


def _open_table(path: Path, spool_dir: Path | None, keep_nulls: bool) -> Table:
    if (path / STATE).is_file():
        return ArrowTable(path, "a saved dataset", saved_batches, spool_dir=spool_dir, keep_nulls=keep_nulls)
    if (path / SPLITS).is_file():
        raise DataError(f"{path}: holds the splits of a dataset. Name one of them: {_neighbours(path)}")
    if path.is_dir():
        raise DataError(f"{path}: is a folder. Name its files one by one: {_neighbours(path)}")
    if not path.exists():
        raise DataError(f"{path}: no such file. In {path.parent}: {_neighbours(path.parent)}")
    if (kind := irregular(path)) is not None:
        raise DataError(f"{path}: is {kind}, and no file: rows are read more than once. Write them into a file first")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    compressed = path.suffix.lower() in COMPRESSED
    match (path.with_suffix("") if compressed else path).suffix.lower():
        case ending if ending in LINES:
            return JsonlTable(path, spool_dir=spool_dir)
        case ".parquet" | ".pq":
            kind, read = "parquet", parquet_batches
        case ".arrow" | ".feather":
            kind, read = "Arrow", arrow_batches
        case ".csv" | ".tsv":
            kind, read = "CSV", csv_batches
        case other:
            known = ".parquet, .arrow, .csv, or .jsonl with one JSON object per line"
            raise DataError(f"{path}: unknown format {other!r}. Use {known}")
    if compressed and kind != "CSV":
        raise DataError(f"{path}: {kind} is compressed inside. Name a file without {path.suffix}")
    return ArrowTable(path, kind, read, spool_dir=spool_dir, keep_nulls=keep_nulls)


def _neighbours(folder: Path, most: int = 8) -> str:
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    return ", ".join(names[:most]) + (", …" if len(names) > most else "") or "nothing"


def is_united(name: str) -> bool:
    """Return whether the rows of a file come by way of Arrow, which gives every row the keys of all."""
    path = Path(name).expanduser()
    return path.suffix.lower() in (".parquet", ".pq", ".arrow", ".feather") or (path / STATE).is_file()
