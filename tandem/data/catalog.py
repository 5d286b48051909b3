"""A catalogue: the usable rows of several tables, as items that training can take.

Every row is read and encoded once, before anything else starts: so bad rows are found at once, the number of items is
exact, and counts say what became of each row. After that the items stay in memory, or (``streaming``) only 12 bytes a
row do, and an item is read and encoded again whenever it is drawn.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar, overload

from tandem.base.errors import DataError
from tandem.data.modalities import beyond_text
from tandem.data.pictures import Sight
from tandem.data.rows import Row, RowError, Table


class OnBadRow(StrEnum):
    """A row that can't be used: stop with its file and number, or leave it out and count it."""

    ERROR = "error"
    DROP = "drop"


class RowSkipped(Exception):
    """The configuration says to leave this row out (too long, held out): counted, never an error."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Item(Protocol):
    """What a catalogue holds. ``cut``: the length policy shortened it. A ``Prompt`` is one, and so is an
    ``Example``.
    """

    @property
    def cut(self) -> bool:
        """Whether tokens were cut off."""


T = TypeVar("T", bound=Item)
Encode = Callable[[int, Row], T]


@dataclass(frozen=True)
class RowCounts:
    """What became of the rows: ``rows`` = ``kept`` + the sum of ``dropped`` (by reason); ``cut`` of those kept.

    ``str`` gives one line of it.
    """

    rows: int
    kept: int
    cut: int
    dropped: dict[str, int]

    def __str__(self) -> str:
        dropped = "".join(f", {count} dropped ({reason})" for reason, count in sorted(self.dropped.items()))
        return f"{self.rows} rows, {self.kept} kept" + (f", {self.cut} cut to length" if self.cut else "") + dropped


@dataclass
class _Tally:
    """The counts while a scan is under way, and the first rows that were left out, for the error if none is kept."""

    rows: int = 0
    cut: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first: str = ""

    def drop(self, reason: str, detail: str) -> None:
        self.dropped[reason] += 1
        self.first = self.first or detail


class Catalog(Sequence[T], Generic[T]):
    """The usable rows of ``tables`` in order, as ``encode(table_index, row)`` makes them.

    ``encode`` raises ``RowError`` for a row that can't be used (``on_bad_row`` decides), ``RowSkipped`` for one to
    leave out. ``sight``: how images are read, where they are. Raises ``DataError`` if a table has no row or no row is
    left.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        encode: Encode[T],
        *,
        on_bad_row: OnBadRow = OnBadRow.ERROR,
        streaming: bool = False,
        sight: Sight | None = None,
    ) -> None:
        self._tables = tables
        self._encode = encode
        self._sight = sight
        self._items: list[T] | None = None if streaming else []
        self._places = (array("i"), array("q"))  # table index, row number
        digest, tally = hashlib.blake2b(digest_size=16), _Tally()
        for index, table in enumerate(tables):
            for row in _rows(table):
                tally.rows += 1
                item = self._admit(index, row, on_bad_row, tally)
                if item is not None and not isinstance(row, RowError):
                    digest.update(repr(item).encode())
                    self._keep(index, row.number, item)
        self.counts = RowCounts(tally.rows, len(self._places[0]), tally.cut, dict(tally.dropped))
        self.fingerprint = digest.hexdigest()
        if not self._places[0]:
            names = ", ".join(table.name for table in tables)
            raise DataError(f"{names}: no usable row ({self.counts}). The first one left out: {tally.first}")

    def __len__(self) -> int:
        return len(self._places[0])

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if self._items is not None:
            return self._items[index]
        table = self._places[0][index]
        return self._encode(table, self._tables[table].row(self._places[1][index]))

    def _admit(self, table: int, row: Row | RowError, on_bad_row: OnBadRow, tally: _Tally) -> T | None:
        try:
            if isinstance(row, RowError):
                raise row
            self._refuse_beyond_text(row)
            item = self._encode(table, row)
        except RowSkipped as skipped:
            tally.drop(skipped.reason, f"row {tally.rows} of all, {skipped.reason}")
            return None
        except RowError as error:
            if on_bad_row is OnBadRow.ERROR:
                raise
            tally.drop(error.reason, str(error))
            return None
        tally.cut += item.cut
        return item

    def _refuse_beyond_text(self, row: Row) -> None:
        """Raise ``RowError`` for a row with images or sound that nobody reads: its text alone would be trained on as if
        it were all.
        """
        sight = self._sight
        column = None if sight is None else sight.column
        for _, held in beyond_text(row.values, images=sight is not None, image_key=column):
            read = "text alone" if sight is None else "text and images alone"
            raise row.bad("more than text", f"it has {held}, and models are trained on {read}: leave such rows out")

    def _keep(self, table: int, number: int, item: T) -> None:
        self._places[0].append(table)
        self._places[1].append(number)
        if self._items is not None:
            self._items.append(item)


def _rows(table: Table) -> Iterator[Row | RowError]:
    empty = True
    for row in table.scan():
        empty = False
        yield row
    if empty:
        raise DataError(f"{table.name}: no rows in it")
