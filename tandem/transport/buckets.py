"""Weights as buckets of bytes: what lies where in one, told in JSON. Any shapes and dtypes, bit by bit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tandem.models.shared_weights import Place

_ALIGNED = 64  # bytes; every tensor starts at a multiple, so that a view of any dtype is aligned


@dataclass(frozen=True, eq=False)
class Bucket:
    """Some (name, tensor) pairs in one piece of memory. ``data`` (B,) uint8; ``places`` are in it, in order."""

    places: tuple[Place, ...]
    data: torch.Tensor

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, which share the memory of ``data``."""
        for place in self.places:
            size = math.prod(place.shape) * place.dtype.itemsize
            part = self.data[place.offset : place.offset + size]
            yield place.name, part.view(place.dtype).view(place.shape)

    def label(self) -> bytes:
        """Return the places as JSON, for ``places_of``."""
        return json.dumps([place.to_json() for place in self.places]).encode()


def places_of(label: bytes) -> tuple[Place, ...]:
    """Return the places that ``Bucket.label`` told."""
    return tuple(Place.from_json(fields) for fields in json.loads(label))


def pack(pairs: Sequence[tuple[str, torch.Tensor]], memory: torch.Tensor | None = None) -> Bucket:
    """Copy ``pairs`` into a bucket in the host's memory; into ``memory`` (B,) uint8 where that has the right size."""
    places: list[Place] = []
    used = 0
    for name, tensor in pairs:
        places.append(Place(name, tensor.dtype, tuple(tensor.shape), used))
        used += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    data = memory if memory is not None and memory.numel() == used else torch.zeros(used, dtype=torch.uint8)
    bucket = Bucket(tuple(places), data)
    for (_, target), (_, tensor) in zip(bucket.pairs(), pairs, strict=True):
        target.copy_(tensor.detach())
    return bucket


def pieces(data: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Yield ``data`` (B,) uint8 in parts of at most ``most`` bytes, which share its memory."""
    yield from data.split(most) if data.numel() else ()
