"""Which rows an index means: int, slice, list, index tensor or bool mask, with the same rules for every column."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tandem.base.errors import ContractError

Selection: TypeAlias = slice | Sequence[int] | Sequence[bool] | Tensor


def single_row(index: Any) -> int | None:
    """Return the row number if ``index`` means one row, else None."""
    if isinstance(index, Tensor):
        return int(index) if index.ndim == 0 and _is_integer(index) else None
    return int(index) if isinstance(index, Integral) else None


def resolve_rows(index: Any, size: int) -> slice | Tensor:
    """Return ``index`` over ``size`` rows as a slice ``start:stop`` of step 1, or as an index tensor (K,) int64, all in
    range.

    Raises ``IndexError`` for a row that isn't there, ``ContractError`` for a mask of another length or an index that
    is neither.
    """
    if isinstance(index, slice):
        start, stop, step = index.indices(size)
        if step == 1:
            return slice(start, max(start, stop))
        return torch.tensor(list(range(start, stop, step)), dtype=torch.int64)
    rows = index if isinstance(index, Tensor) else torch.as_tensor(index)
    if rows.numel() == 0 and not isinstance(index, Tensor):
        rows = rows.to(torch.int64)  # an empty list has no dtype of its own
    rows = rows.cpu()
    if rows.ndim != 1 or not (rows.dtype == torch.bool or _is_integer(rows)):
        raise ContractError(
            "rows are chosen by int, slice, list, index tensor (K,) or bool mask (B,); "
            f"got {tuple(rows.shape)} {rows.dtype}"
        )
    if rows.dtype == torch.bool:
        if len(rows) != size:
            raise ContractError(f"a bool mask over {size} rows must have {size} entries, got {len(rows)}")
        return rows.nonzero().squeeze(1)
    rows = rows.to(torch.int64)
    outside = (rows < -size) | (rows >= size)
    if bool(outside.any()):
        raise IndexError(f"row {int(rows[outside][0])} of {size} rows")
    return torch.where(rows < 0, rows + size, rows)


def pick(items: list[Any], rows: slice | Tensor) -> list[Any]:
    """Return the chosen entries of a Python list, ``rows`` as given by ``resolve_rows``."""
    return items[rows] if isinstance(rows, slice) else [items[i] for i in rows.tolist()]


def _is_integer(x: Tensor) -> bool:
    return not (x.dtype == torch.bool or x.is_floating_point() or x.is_complex())
