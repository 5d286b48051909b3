"""DataProto: the one batch type that every part takes and gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor

from tandem.base.errors import ContractError, DataError
from tandem.columns import images, storage
from tandem.columns.equality import same_value
from tandem.columns.merging import join_meta, join_tables, merge_meta
from tandem.columns.ragged import Ragged, Scalar
from tandem.columns.selection import Selection, pick, resolve_rows, single_row
from tandem.columns.table import BatchSize, Column, Columns, Fields

Loose: TypeAlias = Column | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class DataProtoItem:
    """One sample: ``batch[name]`` is an unpadded row (L,) of a ragged column, or one entry of a row column."""

    batch: dict[str, Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]
    tokenizer: Any = None


class DataProto:
    """A batch of B samples, kept as columns.

    ``batch``: column -> tensor (B, ...) or ``Ragged`` of B rows. ``non_tensor_batch``: name -> Python list of length B.
    ``meta_info``: what holds for the batch as a whole. ``tokenizer``: for whoever reads tokens as text; never saved.

    Every method but ``pop`` and the two mappings' assignment leaves the batch as it is and gives a new one; tensors are
    shared where rows need not move. Raises ``ContractError`` naming the column for anything that doesn't fit.

    >>> batch = DataProto({"prompts": [torch.tensor([1, 2]), torch.tensor([3])]}, {"data_source": ["math", "code"]})
    >>> batch[1].batch["prompts"], batch[[1]].non_tensor_batch["data_source"]
    (tensor([3]), ['code'])
    """

    def __init__(
        self,
        batch: Mapping[str, Loose] | None = None,
        non_tensor_batch: Mapping[str, Iterable[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._size = BatchSize()
        self.batch = Columns(self._size)
        self.non_tensor_batch = Fields(self._size)
        self.meta_info: dict[str, Any] = dict(meta_info or {})
        self.tokenizer = tokenizer
        for name, column in (batch or {}).items():
            self.batch[name] = column
        for name, items in (non_tensor_batch or {}).items():
            self.non_tensor_batch[name] = items

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Loose] | None = None,
        non_tensors: Mapping[str, Iterable[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
    ) -> DataProto:
        """Return the constructor under the name that the field uses."""
        return cls(tensors, non_tensors, meta_info, tokenizer)

    # --- reading -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._size.value or 0

    @property
    def columns(self) -> list[str]:
        """Names of all columns, tensor and other."""
        return [*self.batch, *self.non_tensor_batch]

    def padded(self, column: str, fill: Scalar = 0, width: int | None = None, *, left: bool = False) -> Tensor:
        """Return the ragged ``column`` as a dense copy (B, L); see ``Ragged.padded``."""
        return self.ragged(column).padded(fill, width, left=left)

    def ragged(self, column: str) -> Ragged:
        """Return ``batch[column]``, which must be ragged."""
        value = self.batch[column]
        if not isinstance(value, Ragged):
            raise ContractError(f"column {column!r}: expected ragged rows, got a tensor {tuple(value.shape)}")
        return value

    def dense(self, column: str) -> Tensor:
        """Return ``batch[column]``, which must be a tensor (B, ...)."""
        value = self.batch[column]
        if isinstance(value, Ragged):
            raise ContractError(f"column {column!r}: expected a tensor (B, ...), got ragged rows; use padded()")
        return value

    @overload
    def __getitem__(self, index: int) -> DataProtoItem: ...
    @overload
    def __getitem__(self, index: str) -> Column | list[Any]: ...
    @overload
    def __getitem__(self, index: Selection) -> DataProto: ...
    def __getitem__(self, index: int | str | Selection) -> DataProtoItem | DataProto | Column | list[Any]:
        """Return one item for an int, a batch of the rows for a slice, list, index tensor (K,) or bool mask (B,), and
        for a name that column, tensor or other.
        """
        if isinstance(index, str):
            return self.non_tensor_batch[index] if index in self.non_tensor_batch else self.batch[index]
        one = single_row(index)
        if one is None:
            return self._take(resolve_rows(index, len(self)))
        if not -len(self) <= one < len(self):
            raise IndexError(f"sample {one} of a batch of {len(self)}")
        batch = {name: column[one] for name, column in self.batch.items()}
        return self._item(batch, {name: items[one] for name, items in self.non_tensor_batch.items()})

    def __iter__(self) -> Iterator[DataProtoItem]:
        rows = {n: c.rows() if isinstance(c, Ragged) else c.unbind(0) for n, c in self.batch.items()}
        for i in range(len(self)):
            batch = {name: column[i] for name, column in rows.items()}
            yield self._item(batch, {name: items[i] for name, items in self.non_tensor_batch.items()})

    def equals(self, other: DataProto) -> bool:
        """Return whether columns, values (NaN equals NaN), dtypes, row order and meta_info are equal, the tokenizer
        aside.
        """
        mine = (len(self), dict(self.batch), dict(self.non_tensor_batch), self.meta_info)
        return same_value(mine, (len(other), dict(other.batch), dict(other.non_tensor_batch), other.meta_info))

    def __repr__(self) -> str:
        return f"DataProto({len(self)} samples, batch={dict(self.batch)}, other={sorted(self.non_tensor_batch)})"

    # --- choosing columns --------------------------------------------------------------------------------------------

    def select(self, *columns: str) -> DataProto:
        """Return only these columns, tensor or other, in this order."""
        self._must_have(columns)
        return self._with(
            {name: self.batch[name] for name in columns if name in self.batch},
            {name: self.non_tensor_batch[name] for name in columns if name in self.non_tensor_batch},
        )

    def pop(self, *columns: str) -> DataProto:
        """Take these columns out of this batch and give them as one of their own."""
        taken = self.select(*columns)
        for name in taken.columns:
            if name in self.batch:
                del self.batch[name]
            else:
                del self.non_tensor_batch[name]
        return taken

    def rename(self, names: Mapping[str, str]) -> DataProto:
        """Rename columns: ``{old: new}``."""
        self._must_have(names)
        new = [names.get(name, name) for name in self.columns]
        twice = sorted({name for name in new if new.count(name) > 1})
        if twice:
            raise ContractError(f"rename {dict(names)}: column {twice[0]!r} would be there twice")
        renamed = dict(zip(self.columns, new, strict=True))
        return self._with(
            {renamed[name]: column for name, column in self.batch.items()},
            {renamed[name]: items for name, items in self.non_tensor_batch.items()},
        )

    def union(self, other: DataProto) -> DataProto:
        """Return the columns and meta_info of both; what both have must be equal."""
        both = join_tables(self.batch, other.batch), join_tables(self.non_tensor_batch, other.non_tensor_batch)
        tokenizer = self.tokenizer if self.tokenizer is not None else other.tokenizer
        return DataProto(*both, merge_meta(self.meta_info, other.meta_info), tokenizer)

    # --- choosing rows -----------------------------------------------------------------------------------------------

    def chunk(self, chunks: int) -> list[DataProto]:
        """Return ``chunks`` equal parts in order; refused where they can't be equal (see ``pad_to_divisor``)."""
        if chunks < 1 or len(self) % chunks:
            raise ContractError(
                f"chunk: {len(self)} samples don't divide into {chunks} equal parts; use "
                f"pad_to_divisor({chunks}) first, or split(size) if the last part may be smaller"
            )
        if len(self) == 0:
            return [self[:] for _ in range(chunks)]
        return self.split(len(self) // chunks)

    def split(self, size: int) -> list[DataProto]:
        """Return the parts of ``size`` samples in order; the last one has what is left."""
        if size < 1:
            raise ContractError(f"split: size must be at least 1, got {size}")
        return [self[start : start + size] for start in range(0, len(self), size)]

    def reorder(self, order: Selection) -> DataProto:
        """Return the rows in the given ``order`` (B,), a permutation."""
        rows = resolve_rows(order, len(self))
        index = torch.arange(len(self))[rows]
        if not torch.equal(index.sort().values, torch.arange(len(self))):
            raise ContractError(f"reorder: not a permutation of {len(self)} rows; to choose rows, index the batch")
        return self._take(rows)

    def repeat(self, times: int | Sequence[int], interleave: bool = True) -> DataProto:
        """Return each row ``times`` times: a a b b where ``interleave``, else a b a b. A number per row may be 0."""
        rows = torch.arange(len(self))
        if not isinstance(times, int):
            if len(times) != len(self) or min(times, default=0) < 0:
                raise ContractError(f"repeat: times must be {len(self)} numbers of at least 0, got {list(times)}")
            return self._take(rows.repeat_interleave(torch.tensor(times, dtype=torch.int64)))
        if times < 1:
            raise ContractError(f"repeat: times must be at least 1, got {times}")
        return self._take(rows.repeat_interleave(times) if interleave else rows.repeat(times))

    def pad_to_divisor(self, divisor: int) -> tuple[DataProto, int]:
        """Repeat rows from the start until ``divisor`` divides their number, and how many were added."""
        if divisor < 1 or len(self) == 0:
            raise ContractError(f"pad_to_divisor({divisor}): needs a positive divisor and at least one sample")
        missing = -len(self) % divisor
        return self._take(torch.arange(len(self) + missing) % len(self)), missing

    def unpad(self, pad_size: int) -> DataProto:
        """Return the batch without the last ``pad_size`` rows, which ``pad_to_divisor`` added."""
        if not 0 <= pad_size <= len(self):
            raise ContractError(f"unpad: pad_size {pad_size} of {len(self)} samples")
        return self[: len(self) - pad_size]

    @classmethod
    def concat(cls, parts: Sequence[DataProto]) -> DataProto:
        """Return the samples of all parts. All need the same columns; meta_info as ``join_meta`` says."""
        if not parts:
            raise ContractError("concat: nothing to join")
        names = set(parts[0].columns)
        for i, part in enumerate(parts):
            if odd := names ^ set(part.columns):
                raise ContractError(f"concat: column {sorted(odd)[0]!r} is not in every part (see parts 0 and {i})")
        batch = {name: _concat(name, [part.batch[name] for part in parts]) for name in parts[0].batch}
        others = {
            name: [x for part in parts for x in part.non_tensor_batch[name]] for name in parts[0].non_tensor_batch
        }
        tokenizer = next((part.tokenizer for part in parts if part.tokenizer is not None), None)
        return cls(batch, others, join_meta([part.meta_info for part in parts]), tokenizer)

    # --- moving and keeping ------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> DataProto:
        """Return the batch with all its tensors on ``device``."""
        return self._with({name: c.to(device=device) for name, c in self.batch.items()}, self.non_tensor_batch)

    def save(self, folder: str | Path) -> None:
        """Write safetensors + JSON into ``folder``, atomically also over an older save.

        Raises ``ContractError`` naming the place of a value in ``non_tensor_batch`` or ``meta_info`` that is not
        plain JSON data.
        """
        storage.write_folder(Path(folder), *self._parts())

    @classmethod
    def load(cls, folder: str | Path, tokenizer: Any = None) -> DataProto:
        """Return what ``save`` wrote, on the CPU; raises ``DataError`` naming the file if it isn't there or isn't
        whole.
        """
        return cls._from_parts(*storage.read_folder(Path(folder)), tokenizer)

    def to_bytes(self) -> bytes:
        """Return what ``save`` writes, as bytes for another process."""
        return storage.to_bytes(*self._parts())

    @classmethod
    def from_bytes(cls, data: bytes, tokenizer: Any = None) -> DataProto:
        """Return what ``to_bytes`` gave; raises ``DataError`` if the bytes aren't whole."""
        return cls._from_parts(*storage.from_bytes(data), tokenizer)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        for name, column in self.batch.items():
            if isinstance(column, Ragged):
                tensors[f"{name}.values"], tensors[f"{name}.offsets"] = column.values, column.offsets
            else:
                tensors[name] = column
        others, pictures = images.pack(self.non_tensor_batch)
        tensors |= pictures
        header = {
            "size": self._size.value,
            "batch": list(self.batch),
            "non_tensor_batch": others,
            "meta_info": self.meta_info,
        }
        return tensors, header

    @classmethod
    def _from_parts(cls, tensors: dict[str, Tensor], header: Any, tokenizer: Any) -> DataProto:
        batch: dict[str, Column] = {}
        try:
            for name in header["batch"]:
                ragged = f"{name}.values" in tensors
                batch[name] = Ragged(tensors[f"{name}.values"], tensors[f"{name}.offsets"]) if ragged else tensors[name]
            others = images.unpack(header["non_tensor_batch"], tensors)
            loaded = cls(batch, others, header["meta_info"], tokenizer)
            loaded._size.value = header["size"]
        except (KeyError, TypeError) as error:
            raise DataError(f"saved DataProto: tensors and header don't belong together: {error!r}") from error
        return loaded

    def _item(self, batch: dict[str, Tensor], others: dict[str, Any]) -> DataProtoItem:
        return DataProtoItem(batch, others, self.meta_info, self.tokenizer)

    def _take(self, rows: slice | Tensor) -> DataProto:
        return self._with(
            {name: c.take(rows) if isinstance(c, Ragged) else c[_on(c, rows)] for name, c in self.batch.items()},
            {name: pick(items, rows) for name, items in self.non_tensor_batch.items()},
        )

    def _with(self, batch: Mapping[str, Loose], others: Mapping[str, Iterable[Any]]) -> DataProto:
        return DataProto(batch, others, self.meta_info, self.tokenizer)

    def _must_have(self, columns: Iterable[str]) -> None:
        for name in columns:
            if name not in self.batch and name not in self.non_tensor_batch:
                raise ContractError(f"column {name!r} is not in this batch; it has {sorted(self.columns)}")


def _on(column: Tensor, rows: slice | Tensor) -> slice | Tensor:
    return rows.to(column.device) if isinstance(rows, Tensor) else rows


def _concat(name: str, parts: list[Column]) -> Column:
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if ragged:
        return Ragged.concat(ragged)
    return torch.cat([part for part in parts if isinstance(part, Tensor)])
