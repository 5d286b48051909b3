"""Tables by way of Arrow: parquet, its own files, folders of ``datasets``, CSV; in batches, or one row at a time."""

from __future__ import annotations

import json
import tempfile
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tandem.base.errors import DataError
from tandem.base.lazy import LazyModule
from tandem.data.rows import Row, RowError

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.csv as csv  # type: ignore[import-untyped]
    import pyarrow.ipc as ipc  # type: ignore[import-untyped]
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]
else:
    pyarrow = LazyModule("pyarrow")
    csv = LazyModule("pyarrow.csv")
    ipc = LazyModule("pyarrow.ipc")
    parquet = LazyModule("pyarrow.parquet")

BATCH_ROWS = 256
STATE, SPLITS = "state.json", "dataset_dict.json"
"""What ``save_to_disk`` writes beside the data of a dataset, and beside the folders of its splits."""

Read = Callable[[Path], Iterator[Any]]
"""From a path to the record batches there."""


def parquet_batches(path: Path) -> Iterator[Any]:
    """Yield the batches of a parquet file."""
    with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        yield from file.iter_batches(batch_size=BATCH_ROWS)


def arrow_batches(path: Path) -> Iterator[Any]:
    """Yield the batches of a file that Arrow wrote: a stream, as ``datasets`` writes it, or a file (feather)."""
    with pyarrow.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = ipc.open_file(source)
            batches: Iterator[Any] = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            batches = iter(ipc.open_stream(source))
        for batch in batches:
            for first in range(0, len(batch), BATCH_ROWS):
                yield batch.slice(first, BATCH_ROWS)


def saved_batches(folder: Path) -> Iterator[Any]:
    """Yield the batches of a folder that a dataset was saved to with ``save_to_disk``."""
    for file in json.loads((folder / STATE).read_text("utf-8"))["_data_files"]:
        yield from arrow_batches(folder / file["filename"])


def csv_batches(path: Path) -> Iterator[Any]:
    """Yield the batches of a CSV or TSV file, plain or compressed. All values are text: the file says no more."""
    is_tsv = ".tsv" in (suffix.lower() for suffix in path.suffixes)
    cells = csv.ParseOptions(delimiter="\t" if is_tsv else ",", newlines_in_values=True)
    with pyarrow.input_stream(str(path), compression="detect") as source:
        names = csv.open_csv(source, parse_options=cells).schema.names
    options = csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False)
    with pyarrow.input_stream(str(path), compression="detect") as source:
        yield from csv.open_csv(source, parse_options=cells, convert_options=options)


class ArrowTable:
    """Rows that ``read`` gives as record batches, from the first each time it is called; ``kind`` is what they are.

    Single rows are read from a temporary copy in ``spool_dir`` (default: the system's place). Null keys inside a column
    count as absent, since Arrow gives every row the keys of all, unless ``keep_nulls``.
    """

    def __init__(
        self, path: Path, kind: str, read: Read, *, spool_dir: Path | None = None, keep_nulls: bool = False
    ) -> None:
        self.name = str(path)
        self._path, self._kind, self._read = path, kind, read
        self._united = not keep_nulls
        self._spool_dir = spool_dir
        next(self._batches(), None)  # a file of another kind is refused now

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
            for batch in self._read(self._path):
                names = batch.schema.names
                if twice := next((name for name in names if names.count(name) > 1), None):
                    raise DataError(f"{self.name}: two columns are called {twice!r}: keep the one that is meant")
                yield batch
        except (pyarrow.ArrowException, OSError, KeyError, ValueError) as error:
            raise DataError(f"{self.name}: can't be read as {self._kind} ({error})") from error

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
