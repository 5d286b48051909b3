"""The two mappings inside a DataProto. Every assignment is checked, so a wrong column is refused where it is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from tandem.base.errors import ContractError
from tandem.columns.ragged import Ragged
from tandem.columns.schema import Found, Kind, alignment, check, check_object

Column: TypeAlias = Tensor | Ragged
Stored = TypeVar("Stored", Tensor | Ragged, list[Any])


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as columns declare it: ``torch.float32`` gives ``"float32"``."""
    return str(dtype).removeprefix("torch.")


class BatchSize:
    """The number of samples, shared by the mappings of one batch; unknown until the first column."""

    def __init__(self) -> None:
        self.value: int | None = None

    def admit(self, name: str, rows: int) -> None:
        """Raise ``ContractError`` unless a column of ``rows`` rows fits."""
        if self.value is None:
            self.value = rows
        elif rows != self.value:
            raise ContractError(f"column {name!r}: expected {self.value} rows as in the other columns, got {rows}")


class _Table(MutableMapping[str, Stored], Generic[Stored]):
    def __init__(self, size: BatchSize) -> None:
        self._size = size
        self._columns: dict[str, Stored] = {}

    def __getitem__(self, name: str) -> Stored:
        if name not in self._columns:
            raise ContractError(f"column {name!r} is not in this batch; it has {sorted(self._columns)}")
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __delitem__(self, name: str) -> None:
        del self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._columns!r})"


class Columns(_Table[Column]):
    """Column name -> tensor (B, ...) or ``Ragged`` of B rows; a list of 1-D tensors becomes a ``Ragged``.

    Assigning raises ``ContractError``, naming the column, if it isn't declared, has another kind or dtype than
    declared, another number of rows than the batch, or other row lengths than the columns it is aligned with.
    """

    def __setitem__(self, name: str, value: Column | Sequence[Tensor]) -> None:
        column = value if isinstance(value, Tensor | Ragged) else self._from_rows(name, value)
        kind = Kind.RAGGED if isinstance(column, Ragged) else Kind.ROW
        check({name: Found(kind, dtype_name(column.dtype))})
        if isinstance(column, Tensor) and column.ndim == 0:
            raise ContractError(f"column {name!r}: expected a tensor (B, ...), got a 0-d tensor")
        if isinstance(column, Ragged):
            self._check_aligned(name, column)
        self._size.admit(name, len(column) if isinstance(column, Ragged) else column.shape[0])
        self._columns[name] = column

    @staticmethod
    def _from_rows(name: str, rows: Sequence[Tensor]) -> Ragged:
        if not isinstance(rows, list | tuple) or not all(isinstance(row, Tensor) for row in rows) or not rows:
            raise ContractError(
                f"column {name!r}: expected a tensor (B, ...), a Ragged or a list of 1-D tensors, "
                f"got {type(rows).__name__}"
            )
        return Ragged.from_rows(rows)

    def _check_aligned(self, name: str, column: Ragged) -> None:
        root = alignment(name)
        for other, sibling in self._columns.items():
            if other != name and isinstance(sibling, Ragged) and alignment(other) == root:
                same = column.offsets is sibling.offsets  # as `Ragged.like` makes them
                if not same and len(column) == len(sibling) and not torch.equal(column.offsets, sibling.offsets):
                    row = int((column.lengths != sibling.lengths).nonzero()[0])
                    raise ContractError(
                        f"column {name!r}: row {row} has {int(column.lengths[row])} entries, but that of {other!r} "
                        f"has {int(sibling.lengths[row])}; token columns must be equally long"
                    )
                return  # the others are aligned with this one already


class Fields(_Table[list[Any]]):
    """Name -> Python list of length B. Any name is the user's to choose, except that of a declared tensor column."""

    def __setitem__(self, name: str, value: Iterable[Any]) -> None:
        check_object(name)
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise ContractError(f"column {name!r}: expected a list of one entry per sample, got {type(value).__name__}")
        items = list(value)
        self._size.admit(name, len(items))
        self._columns[name] = items
