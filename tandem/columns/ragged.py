"""Rows of different lengths in one flat tensor: ``values`` (N, ...) + ``offsets`` (B + 1,)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import torch
from torch import Tensor

from tandem.base.errors import ContractError
from tandem.columns.selection import Selection, resolve_rows, single_row

# Above this mean row size (elements), copying row by row beats gathering with one index per element.
_LONG_ROW = 256

Scalar: TypeAlias = int | float | bool


@dataclass(frozen=True, eq=False)
class Ragged:
    """B rows, unpadded. Row ``i`` is ``values[offsets[i] : offsets[i + 1]]``.

    ``values`` (N, ...) is of any dtype and on any device. ``offsets`` (B + 1,) int64 stays on the CPU, because lengths
    decide packing and batching there. Never changed in place by this class: slices and rows are views.

    Raises ``ContractError`` if the offsets don't start at 0, fall, or don't end at N.
    """

    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        values, offsets = self.values, self.offsets
        if values.ndim == 0:
            raise ContractError("ragged values: expected (N, ...), got a 0-d tensor")
        if offsets.dtype != torch.int64 or offsets.ndim != 1 or offsets.shape[0] == 0 or offsets.device.type != "cpu":
            raise ContractError(
                f"ragged offsets: expected (B + 1,) int64 on the CPU, got {tuple(offsets.shape)} {offsets.dtype} "
                f"on {offsets.device}"
            )
        bounds = offsets.tolist()  # a list, because a few tensor operations take longer than to read a thousand numbers
        if bounds[0] != 0 or bounds[-1] != values.shape[0] or sorted(bounds) != bounds:
            raise ContractError(
                f"ragged offsets: must rise from 0 to the number of values {values.shape[0]}, got {bounds[:8]}…"
            )

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor], dtype: torch.dtype | None = None) -> Ragged:
        """Make one row per tensor (L_i, ...). ``dtype`` converts, and is needed where there are no rows."""
        if not rows:
            if dtype is None:
                raise ContractError("Ragged.from_rows: no rows and no dtype; say dtype=... for an empty column")
            return cls(torch.empty(0, dtype=dtype), torch.zeros(1, dtype=torch.int64))
        for i, row in enumerate(rows):
            if row.ndim == 0 or row.dtype != rows[0].dtype or row.shape[1:] != rows[0].shape[1:]:
                raise ContractError(
                    f"Ragged.from_rows: row {i} is {tuple(row.shape)} {row.dtype}, row 0 is {tuple(rows[0].shape)} "
                    f"{rows[0].dtype}; all need at least one dimension, one dtype and equal trailing dimensions"
                )
        values = torch.cat(tuple(rows))
        return cls.from_lengths(values if dtype is None else values.to(dtype), [row.shape[0] for row in rows])

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor | Sequence[int]) -> Ragged:
        """Cut flat ``values`` (N, ...) into rows of ``lengths`` (B,), which must sum to N."""
        return cls(values, _offsets(torch.as_tensor(lengths, dtype=torch.int64, device="cpu")))

    @classmethod
    def from_padded(cls, x: Tensor, mask: Tensor) -> Ragged:
        """Return the entries of ``x`` (B, L, ...) where ``mask`` (B, L) bool, padded left or right.

        A mask with a hole in a row is refused: it marks trained tokens, not padding, and would drop tokens.
        """
        if mask.dtype != torch.bool or mask.ndim != 2 or x.shape[:2] != mask.shape:
            raise ContractError(
                f"from_padded: expected x (B, L, ...) and mask (B, L) bool, got {tuple(x.shape)} and "
                f"{tuple(mask.shape)} {mask.dtype}"
            )
        starts = mask.clone()
        starts[:, 1:] &= ~mask[:, :-1]
        broken = (starts.sum(1) > 1).nonzero()
        if len(broken):
            raise ContractError(
                f"from_padded: the mask of row {int(broken[0])} has a hole. A padding mask is one block; "
                "keep a mask of trained tokens as a column of its own"
            )
        trailing = x.shape[2:]
        select = mask.reshape(*mask.shape, *([1] * len(trailing)))
        return cls.from_lengths(x.masked_select(select).reshape(-1, *trailing), mask.sum(1))

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """Return the rows of all parts, one after the other."""
        if not parts:
            raise ContractError("Ragged.concat: nothing to join")
        if len(parts) == 1:
            return parts[0]
        first = parts[0].values
        for part in parts:
            if part.values.dtype != first.dtype or part.values.shape[1:] != first.shape[1:]:
                raise ContractError(
                    f"Ragged.concat: parts differ: {first.dtype} (N, {tuple(first.shape[1:])}) and "
                    f"{part.values.dtype} (N, {tuple(part.values.shape[1:])})"
                )
        ends = torch.cat([part.offsets[1:] for part in parts])
        starts = torch.cat([part.offsets[:-1] for part in parts])
        return cls(torch.cat([part.values for part in parts]), _offsets(ends - starts))

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def lengths(self) -> Tensor:
        """Length of each row, (B,) int64 on the CPU."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values; the offsets are always on the CPU."""
        return self.values.device

    def row(self, i: int) -> Tensor:
        """Return the row ``i`` as a view (L_i, ...); negative counts from the end."""
        size = len(self)
        if not -size <= i < size:
            raise IndexError(f"row {i} of a column with {size} rows")
        start, end = self.offsets[i % size : i % size + 2].tolist()
        return self.values[start:end]

    def rows(self) -> tuple[Tensor, ...]:
        """Return all rows in order, as views (L_i, ...) of the values."""
        if len(self) == 0:
            return ()
        return torch.split(self.values, self.lengths.tolist())

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows())

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: Selection) -> Ragged: ...
    def __getitem__(self, index: int | Selection) -> Tensor | Ragged:
        """Return one row for an int, and for a slice, list, index tensor or bool mask the chosen rows, in that
        order.
        """
        one = single_row(index)
        return self.row(one) if one is not None else self.take(resolve_rows(index, len(self)))

    def take(self, rows: slice | Tensor) -> Ragged:
        """Return the rows already resolved by ``resolve_rows``: a slice of step 1 gives a view, an index tensor a
        copy.
        """
        if isinstance(rows, slice):
            offsets = self.offsets[rows.start : rows.stop + 1]
            start, end = int(offsets[0]), int(offsets[-1])
            return Ragged(self.values[start:end], offsets - start)
        offsets = _offsets(self.lengths[rows])
        if self.values.numel() > _LONG_ROW * max(1, len(self)) and len(rows) > 0:
            views = self.rows()
            return Ragged(torch.cat([views[i] for i in rows.tolist()]), offsets)
        shift = self.offsets[:-1][rows] - offsets[:-1]
        source = torch.arange(int(offsets[-1])) + shift.repeat_interleave(offsets[1:] - offsets[:-1])
        return Ragged(self.values.index_select(0, source.to(self.device)), offsets)

    def mask(self, width: int | None = None, *, left: bool = False) -> Tensor:
        """Return where a padded view holds values: (B, width) bool on the device of the values."""
        width = self._width(width)
        lengths = self.lengths.to(self.device).unsqueeze(1)  # (B, 1)
        columns = torch.arange(width, device=self.device)  # (L,)
        return columns >= width - lengths if left else columns < lengths

    def padded(self, fill: Scalar = 0, width: int | None = None, *, left: bool = False) -> Tensor:
        """Return a dense copy (B, L, ...), L = ``width`` or the longest row, filled up on the right (or ``left``)."""
        mask = self.mask(width, left=left)
        trailing = self.values.shape[1:]
        dense = self.values.new_full((*mask.shape, *trailing), fill)
        return dense.masked_scatter(mask.reshape(*mask.shape, *([1] * len(trailing))), self.values)

    def like(self, values: Tensor) -> Ragged:
        """Return the same rows with other ``values`` (N, ...), e.g. one log-prob per token."""
        return Ragged(values, self.offsets)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Ragged:
        """Return the rows on another device or of another dtype; the offsets stay on the CPU."""
        return Ragged(self.values.to(device=device, dtype=dtype), self.offsets)

    def _width(self, width: int | None) -> int:
        longest = int(self.lengths.max()) if len(self) else 0
        if width is None:
            return longest
        if longest > width:
            raise ContractError(f"padded width {width} is less than the longest row, {longest}")
        return width

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {tuple(self.values.shape)} {self.dtype}, {self.device})"


def _offsets(lengths: Tensor) -> Tensor:
    """Turn (B,) lengths into (B + 1,) offsets from 0."""
    offsets = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets
