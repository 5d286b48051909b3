"""Rows and tables: what every reader gives, whatever the rows come from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol, TypeGuard

from tandem.base.errors import DataError


class RowError(DataError):
    """One row can't be used. ``reason`` is a short name under which such rows are counted."""

    def __init__(self, table: str, number: int, reason: str, detail: str) -> None:
        self.reason = reason
        super().__init__(f"{table}, row {number}: {detail}")


@dataclass(frozen=True)
class Row:
    """One row of a table: ``number`` counts from 1 and is the line number in a JSON lines file.

    ``united``: the table gives each mapping inside a column the keys that any row has there, null where this row has
    none, as Arrow does. What a row itself says can't be told from that any more.
    """

    table: str
    number: int
    values: Mapping[str, object]
    united: bool = False

    def bad(self, reason: str, detail: str) -> RowError:
        """Return the error that says what is wrong with this row."""
        return RowError(self.table, self.number, reason, detail)

    def __getitem__(self, key: str) -> object:
        """Return the value of column ``key``. Raises ``RowError`` for a missing column and for null."""
        value = self.find(key)
        if value is None:
            raise self.bad("null", f"column {key!r} is null")
        return value

    def find(self, key: str) -> object:
        """Return the value of column ``key``, null as ``None``; ``a.b`` reaches field b of a nested column a.

        Raises ``RowError`` for a missing column; it lists those there are.
        """
        value: object = self.values
        for name in [key] if key in self.values else key.split("."):
            if not isinstance(value, Mapping) or name not in value:
                there = [str(column) for column in self.values]
                detail = f"no column {key!r} among {', '.join(there) or 'none'}"
                close = get_close_matches(key, there, n=1)
                raise self.bad("missing column", detail + (f": did you mean {close[0]!r}?" if close else ""))
            value = value[name]
        return value

    def named(self, key: str) -> str:
        """Return the value of column ``key`` as a name: a text, or a number as one. Raises ``RowError``."""
        value = self[key]
        if not isinstance(value, str | int | float):
            raise self.bad("not text", f"column {key!r} is {value!r}, and a name is a text or a number")
        try:
            return str(value)
        except ValueError as error:  # an integer of more digits than Python writes
            raise self.bad("not text", f"column {key!r} can't be shown: {error}") from error

    def savable(self, key: str) -> object:
        """Return the value of column ``key``, null as ``None``, if checkpoints and records can hold it as JSON. Raises
        ``RowError``.
        """
        value = self.find(key)
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            detail = f"column {key!r} can't be saved as JSON ({error}): store it as text"
            raise self.bad("not savable", detail) from error
        return value

    def nested(self, key: str) -> object:
        """Return the value ``row[key]`` without the null keys inside of it that may be other rows' (see ``united``)."""
        return _without_nulls(self[key]) if self.united else self[key]


def _without_nulls(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


class Table(Protocol):
    """Rows in a fixed order. ``JsonlTable`` is one in a file, ``RowsTable`` one in memory."""

    @property
    def name(self) -> str:
        """What errors and data sources call it."""

    def scan(self) -> Iterator[Row | RowError]:
        """Yield all rows in order; a row that can't be read is given as its error."""

    def row(self, number: int) -> Row:
        """Return the row of that ``number``, equal to the one of ``scan``. Raises ``RowError``."""


class Indexable(Protocol):
    """Things read by number, such as a list or a map-style torch dataset; ``RowsTable`` makes a table of them."""

    def __len__(self) -> int:
        """Return the number of things that can be read."""

    def __getitem__(self, index: int, /) -> object:
        """Return the one at ``index``, from 0."""


class RowsTable:
    """Rows that are already in Python: a list of dicts, a ``datasets.Dataset``, a map-style torch dataset.

    They may have come by way of Arrow, so null keys inside of them count as absent, unless ``keep_nulls``.
    """

    def __init__(self, name: str, rows: Indexable, *, keep_nulls: bool = False) -> None:
        self.name = name
        self._rows = rows
        self._united = not keep_nulls

    def scan(self) -> Iterator[Row | RowError]:
        """Yield every row in the order of the list; a ``RowError`` in the place of a row that can't be used."""
        for number in range(1, len(self._rows) + 1):
            try:
                yield self.row(number)
            except RowError as error:
                yield error

    def row(self, number: int) -> Row:
        """Return the row ``number``, counted from 1."""
        values = self._rows[number - 1]
        if not isinstance(values, Mapping):
            raise RowError(self.name, number, "not a row", f"a {type(values).__name__}, not a mapping of columns")
        return Row(self.name, number, values, self._united)


def is_indexable(rows: object) -> TypeGuard[Indexable]:
    """Return whether ``rows`` can be read by number (a list, a ``datasets.Dataset``, a torch dataset with a length)."""
    return hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not isinstance(rows, Mapping)
