"""Nested tensors, sharded or not, in a folder: safetensors and JSON, never pickle, readable on any number of ranks.

Each rank writes its own parts of the tensors to ``rank_R_N.safetensors`` (several, so that few are copied at a time)
and what they are parts of to ``rank_R.json``. The first rank also writes what all ranks have alike: whole tensors,
numbers and strings. A reader looks at all lists and takes from each file what overlaps with its own parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from tandem.base.errors import DataError
from tandem.columns import plain_json
from tandem.train.sharding import is_first_copy, local_shard

FORMAT = "tandem-tensors/1"
FILE_BYTES = 2**30
"""About what a file holds, unless a single part is larger."""

_LIST = re.compile(r"rank_(\d{5})\.json")

Place: TypeAlias = tuple[str, ...]
"""The keys that lead to something in nested dicts."""

Corner: TypeAlias = tuple[int, ...]


class OtherContentError(DataError):
    """A whole folder that holds other things than those asked for."""


@dataclass(frozen=True)
class Part:
    """A block of a tensor: from ``offset``, of the shape ``size``. It lies in ``file`` under ``key``."""

    offset: Corner
    size: Corner
    file: str = ""
    key: str = ""

    def overlap(self, other: Part) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Return what both cover, in the coordinates of this part and of the other; None where that is nothing."""
        mine, theirs = [], []
        for start, length, begin, count in zip(self.offset, self.size, other.offset, other.size, strict=True):
            low, high = max(start, begin), min(start + length, begin + count)
            if low >= high:
                return None
            mine.append(slice(low - start, high - start))
            theirs.append(slice(low - begin, high - begin))
        return tuple(mine), tuple(theirs)


@dataclass
class Stored:
    """A tensor in a folder, whole once all ``parts`` are together."""

    shape: Corner
    dtype: str
    parts: list[Part]


# --- writing ---------------------------------------------------------------------------------------------------------


def write_tensors(folder: Path, tensors: Mapping[str, Any], rank: int, world: int) -> list[Path]:
    """Write this rank's share of nested ``tensors`` (dicts of tensors, numbers and strings); the files written.

    Raises ``OSError`` or ``SafetensorError`` where they can't be written.
    """
    listed: list[dict[str, Any]] = []
    values: list[tuple[Place, Any]] = []
    files: list[Path] = []
    bucket: dict[str, torch.Tensor] = {}
    held = 0

    def close() -> None:
        if bucket:
            save_file(bucket, folder / _name(rank, len(files)))
            files.append(folder / _name(rank, len(files)))
            bucket.clear()

    for place, leaf in _leaves(tensors):
        if not isinstance(leaf, torch.Tensor):
            values.append((place, leaf))
            continue
        part = _own_part(leaf)
        entry = {"place": list(place), "shape": list(leaf.shape), "dtype": _dtype(leaf), "parts": []}
        if _is_written(part, leaf, rank):
            shard = local_shard(leaf.detach())
            if held + shard.nbytes > FILE_BYTES:
                close()
                held = 0
            held += shard.nbytes
            key = str(len(bucket))
            bucket[key] = _own_memory(shard, bucket)
            entry["parts"] = [[_name(rank, len(files)), key, list(part.offset), list(part.size)]]
        listed.append(entry)
    close()
    document = {
        "format": FORMAT,
        "ranks": world,
        "tensors": listed,
        "values": [[list(place), value] for place, value in values] if rank == 0 else [],
    }
    text = plain_json.dumps(document, "what is saved")
    (folder / f"rank_{rank:05d}.json").write_text(text)
    return [*files, folder / f"rank_{rank:05d}.json"]


def _own_part(tensor: torch.Tensor) -> Part:
    """Return what this rank has of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return Part((0,) * tensor.dim(), tuple(tensor.shape))
    (chunk,) = tensor.__create_chunk_list__()  # torch's protocol for checkpoints: the block of this rank
    return Part(tuple(chunk.offsets), tuple(chunk.sizes))


def _is_written(part: Part, tensor: torch.Tensor, rank: int) -> bool:
    """Return whether this rank writes it: the first writes what it has, others what none before them has: true parts
    that aren't empty.
    """
    own = rank == 0 or (part.size != tuple(tensor.shape) and is_first_copy(tensor))
    return prod(part.size) > 0 and own


def _own_memory(shard: torch.Tensor, beside: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the tensors on the CPU, contiguous, sharing nothing with what is in the same file."""
    plain = shard.cpu().contiguous()
    storage = plain.untyped_storage().data_ptr()
    shared = any(kept.untyped_storage().data_ptr() == storage for kept in beside.values())
    return plain.clone() if shared else plain


def _name(rank: int, number: int) -> str:
    return f"rank_{rank:05d}_{number:04d}.safetensors"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _leaves(tree: Mapping[str, Any], place: Place = ()) -> Iterator[tuple[Place, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*place, key))
        else:
            yield (*place, key), value


# --- reading ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def read_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    """Fill ``tensors``, built like those saved, in place; numbers and strings in it are replaced.

    Each rank calls this with its own shards. What is saved beside is left aside. Raises ``OtherContentError`` where
    something is missing or has another shape or dtype, ``DataError`` where the folder can't be read.
    """
    stored, values = _read_lists(folder)
    with _Files(folder) as files:
        for place, leaf in list(_leaves(tensors)):
            name, is_tensor = ".".join(place), isinstance(leaf, torch.Tensor)
            if place not in (stored if is_tensor else values):
                raise OtherContentError(f"it has no {name}")
            if is_tensor:
                found, wanted = stored[place], (tuple(leaf.shape), _dtype(leaf))
                if (found.shape, found.dtype) != wanted:
                    has = f"{name} is {found.dtype} {found.shape} in it"
                    raise OtherContentError(f"{has}, {wanted[1]} {wanted[0]} here")
                _fill(files, name, found, leaf)
            else:
                _parent(tensors, place)[place[-1]] = values[place]


def _read_lists(folder: Path) -> tuple[dict[Place, Stored], dict[Place, Any]]:
    """Return all tensors and values of all ranks."""
    stored: dict[Place, Stored] = {}
    values: dict[Place, Any] = {}
    try:
        lists = sorted(path for path in folder.iterdir() if _LIST.fullmatch(path.name))
        if not lists:
            raise DataError(f"{folder} can't be read (there is no rank_00000.json)")
        for path in lists:
            document = plain_json.loads(path.read_bytes())
            if document["format"] != FORMAT or document["ranks"] != len(lists):
                raise DataError(f"{path} can't be read (not one of {len(lists)} lists of the format {FORMAT})")
            for entry in document["tensors"]:
                shape, place = tuple(entry["shape"]), tuple(entry["place"])
                found = stored.setdefault(place, Stored(shape, entry["dtype"], []))
                found.parts += [Part(tuple(at), tuple(size), file, key) for file, key, at, size in entry["parts"]]
            values |= {tuple(place): value for place, value in document["values"]}
    except OSError as error:
        raise DataError(f"{error.filename or folder} can't be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder} can't be read (a list of tensors is damaged: {error})") from error
    return stored, values


class _Files(ExitStack):
    """The files of a folder, each opened when it is first read."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._opened: dict[str, Any] = {}

    def read(self, part: Part, rows: tuple[slice, ...]) -> torch.Tensor:
        """Read these rows (and columns ...) of a part."""
        path = self.folder / part.file
        try:
            if part.file not in self._opened:
                self._opened[part.file] = self.enter_context(safe_open(path, framework="pt"))
            file = self._opened[part.file]
            block: torch.Tensor = file.get_slice(part.key)[rows] if rows else file.get_tensor(part.key)
        except (OSError, SafetensorError, ValueError, IndexError) as error:
            raise DataError(f"{path} can't be read ({error})") from error
        return block


def _fill(files: _Files, name: str, stored: Stored, target: torch.Tensor) -> None:
    """Copy into this rank's part of ``target`` whatever overlaps with it."""
    own, local, filled = _own_part(target), local_shard(target.detach()), 0
    wanted = prod(own.size)
    for part in stored.parts if wanted else ():
        if (both := own.overlap(part)) is not None:
            block = files.read(part, both[1])
            local[both[0]].copy_(block)
            filled += block.numel()
    if filled != wanted:
        raise DataError(f"{files.folder} can't be read (it has {filled} of {wanted} numbers of {name})")


def _parent(tree: dict[str, Any], place: Place) -> dict[str, Any]:
    for key in place[:-1]:
        tree = tree[key]
    return tree
