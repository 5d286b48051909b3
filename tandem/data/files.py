"""Tables of rows on disk: parquet and JSON lines, several files, read in order or one row at a time.

A table is scanned once in order and, where the data stay on disk, read again row by row in any order. Both ways give
the same rows. Memory does not grow with the size of the rows: JSON lines keep 8 bytes a line (where each starts);
parquet, which has no cheap access to one row, is first copied to an anonymous temporary file of small uncompressed
batches.
"""

from __future__ import annotations

import json
import tempfile
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tandem.base.errors import DataError
from tandem.base.lazy import LazyModule
from tandem.base.regular import irregular
from tandem.data.rows import Row, RowError, Table

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.ipc as ipc  # type: ignore[import-untyped]
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]
else:
    pyarrow = LazyModule("pyarrow")
    ipc = LazyModule("pyarrow.ipc")
    parquet = LazyModule("pyarrow.parquet")

BATCH_ROWS = 256
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonlTable:
    """A file of one JSON object per line, UTF-8. Blank lines are skipped but counted in the numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def scan(self) -> Iterator[Row | RowError]:
        """Yield every row in the order of the file; a ``RowError`` in the place of a line that can't be used."""
        with self.path.open("rb") as handle:
            for number, line in enumerate(handle, start=1):
                if line.strip():
                    try:
                        yield self._parse(number, line)
                    except RowError as error:
                        yield error

    def row(self, number: int) -> Row:
        """Return the row on line ``number``."""
        with self.path.open("rb") as handle:
            handle.seek(self._starts[number - 1])
            return self._parse(number, handle.readline())

    @cached_property
    def _starts(self) -> array[int]:
        """Byte offset of each line."""
        starts, offset = array("q"), 0
        with self.path.open("rb") as handle:
            for line in handle:
                starts.append(offset)
                offset += len(line)
        return starts

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


class ParquetTable:
    """A parquet file. Single rows are read from a temporary copy in ``spool_dir`` (default: the system's place).

    Null keys inside a column count as absent, since Arrow gives every row the keys of all, unless ``keep_nulls``.
    """

    def __init__(self, path: Path, *, spool_dir: Path | None = None, keep_nulls: bool = False) -> None:
        self.path = path
        self.name = str(path)
        self._united = not keep_nulls
        self._spool_dir = spool_dir
        next(self._batches(), None)  # a file that is no parquet is refused now

    def scan(self) -> Iterator[Row | RowError]:
        """Yield every row in the order of the file; a ``RowError`` in the place of a row that can't be used."""
        number = 1
        for batch in self._batches():
            yield from self._rows(batch, number)
            number += len(batch)

    def row(self, number: int) -> Row:
        """Return the row ``number``, counted from 1."""
        batch, first = self._spool.batch_of(number)
        (row,) = self._rows(batch.slice(number - first, 1), number)
        if isinstance(row, RowError):
            raise row
        return row

    def _rows(self, batch: Any, number: int) -> Iterator[Row | RowError]:
        try:
            rows = batch.to_pylist(maps_as_pydicts="strict")
        except (UnicodeDecodeError, KeyError, ValueError) as error:
            if len(batch) > 1:
                for i in range(len(batch)):
                    yield from self._rows(batch.slice(i, 1), number + i)
            elif isinstance(error, UnicodeDecodeError):
                yield RowError(self.name, number, "not utf-8", "a text column holds bytes that are not UTF-8")
            else:
                yield RowError(self.name, number, "a key twice", f"{error.args[0]} Keep the one that is meant")
        else:
            for i, values in enumerate(rows):
                yield Row(self.name, number + i, values, self._united)

    def _batches(self) -> Iterator[Any]:
        try:
            with parquet.ParquetFile(self.path, pre_buffer=False, buffer_size=1 << 20) as file:
                names = file.schema_arrow.names
                if twice := next((name for name in names if names.count(name) > 1), None):
                    raise DataError(f"{self.name}: two columns are called {twice!r}: keep the one that is meant")
                yield from file.iter_batches(batch_size=BATCH_ROWS)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self.name}: can't be read as parquet ({error})") from error

    @cached_property
    def _spool(self) -> _Spool:
        return _Spool(self._batches(), self._spool_dir)


class _Spool:
    """Record batches in an anonymous temporary file: any row in one small read, the last batch kept."""

    def __init__(self, batches: Iterator[Any], folder: Path | None) -> None:
        handle: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # lives as long as self
        weakref.finalize(self, handle.close)
        self._firsts, writer, number = array("q"), None, 1
        for batch in batches:
            if writer is None:
                writer = ipc.new_file(pyarrow.PythonFile(handle, mode="w"), batch.schema)
            writer.write_batch(batch)
            self._firsts.append(number)
            number += len(batch)
        if writer is not None:
            writer.close()
            self._reader = ipc.open_file(pyarrow.PythonFile(handle, mode="r"))
        self._held: tuple[int, Any] = (-1, None)

    def batch_of(self, number: int) -> tuple[Any, int]:
        """Return the batch that holds row ``number`` and the number of its first row."""
        index = bisect_right(self._firsts, number) - 1
        if self._held[0] != index:
            self._held = (index, self._reader.get_batch(index))
        return self._held[1], self._firsts[index]


def open_tables(files: Sequence[str | Path], *, spool_dir: Path | None = None, keep_nulls: bool = False) -> list[Table]:
    """Return the tables of ``files`` in the order given. Raises ``DataError`` for a missing file, a folder, another
    format.

    ``keep_nulls``: see ``ParquetTable``; a null in JSON lines was written and always stays.
    """
    if not files:
        raise DataError("no data file named: list at least one .parquet or .jsonl file")
    for file in files:
        if "://" in str(file):
            raise DataError(f"{file}: is an address, and rows are read from files. Download it first")
    return [_open_table(Path(file).expanduser(), spool_dir, keep_nulls) for file in files]


def _open_table(path: Path, spool_dir: Path | None, keep_nulls: bool) -> Table:
    if path.is_dir():
        raise DataError(f"{path}: is a folder. Name its files one by one: {_neighbours(path)}")
    if not path.exists():
        raise DataError(f"{path}: no such file. In {path.parent}: {_neighbours(path.parent)}")
    if (kind := irregular(path)) is not None:
        raise DataError(f"{path}: is {kind}, and no file: rows are read more than once. Write them into a file first")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    match path.suffix.lower():
        case ".parquet" | ".pq":
            return ParquetTable(path, spool_dir=spool_dir, keep_nulls=keep_nulls)
        case ".jsonl" | ".ndjson" | ".json":
            return JsonlTable(path)
        case other:
            raise DataError(f"{path}: unknown format {other!r}. Use .parquet, or .jsonl with one JSON object per line")


def _neighbours(folder: Path, most: int = 8) -> str:
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    return ", ".join(names[:most]) + (", …" if len(names) > most else "") or "nothing"
