"""Weights in memory that several processes map: written once by one, read without a copy by the others."""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch

from tandem.base.errors import WriteError

_ALIGNED = 64  # bytes; every tensor starts at a multiple


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: ``offset`` bytes from the beginning."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def to_json(self) -> list[Any]:
        """Return the fields for a message to the process that maps the memory."""
        return [self.name, str(self.dtype).removeprefix("torch."), list(self.shape), self.offset]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Place:
        """Return the place that ``to_json`` was called on."""
        name, dtype, shape, offset = fields
        return cls(name, getattr(torch, dtype), tuple(shape), offset)

    def view(self, memory: mmap.mmap, beginning: int = 0) -> torch.Tensor:
        """Return the tensor in ``memory``, which begins at the byte ``beginning``; it keeps the memory mapped."""
        count = math.prod(self.shape)
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset - beginning)
        return flat.view(self.shape)


class SharedWeights:
    """(name, tensor) pairs in a file without a name, which exists for as long as a process has it open or mapped.

    It grows by buckets of ``bucket_bytes`` (or one tensor, if that is larger), so that tensors can be written one by
    one as they are gathered, and only what is written takes memory. Iterating gives the pairs of the last ``write``.
    """

    def __init__(self, bucket_bytes: int = 2**26) -> None:
        self._bucket_bytes = bucket_bytes
        self._file = _nameless_file()
        self._bucket: mmap.mmap | None = None  # the last one, and where it begins, ends, and is used up to
        self._begin = self._end = self._used = 0
        self._known: dict[str, tuple[Place, torch.Tensor]] = {}
        self._written: list[str] = []

    def write(self, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> None:
        """Copy ``weights`` in, in place of what was there; floats as ``dtype``, or without one as they come.

        A name that comes twice has the value that came last. After an error the contents are undefined.
        """
        written: dict[str, None] = {}
        for name, tensor in weights:
            kept = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
            self._target(name, kept, tuple(tensor.shape)).copy_(tensor.detach())
            written[name] = None
        self._written = list(written)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._written:
            yield name, self._known[name][1]

    @property
    def places(self) -> list[Place]:
        """Where each tensor of the last ``write`` lies."""
        return [self._known[name][0] for name in self._written]

    @property
    def fd(self) -> int:
        """The open file, to be handed to another process."""
        return self._file.fileno()

    def _target(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if name in self._known:
            place, view = self._known[name]
            if (place.dtype, place.shape) == (dtype, shape):
                return view
        place = Place(name, dtype, shape, self._reserve(math.prod(shape) * dtype.itemsize))
        assert self._bucket is not None
        self._known[name] = place, place.view(self._bucket, self._begin)
        return self._known[name][1]

    def _reserve(self, nbytes: int) -> int:
        """Reserve room for so many bytes in one bucket; returns the offset of the first."""
        if self._bucket is None or self._used + nbytes > self._end:
            length = _rounded(max(nbytes, self._bucket_bytes), mmap.ALLOCATIONGRANULARITY)
            self._begin = self._used = self._end
            self._end += length
            try:
                self._file.truncate(self._end)
                self._bucket = mmap.mmap(self.fd, length, offset=self._begin)
            except OSError as error:
                raise _no_memory(error, self._end) from error
        offset, self._used = self._used, self._used + _rounded(nbytes, _ALIGNED)
        return offset


def map_weights(fd: int, places: Sequence[Place]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the pairs that another process wrote into the file ``fd``, which may be closed afterwards. Not to be
    written.
    """
    memory = mmap.mmap(fd, os.fstat(fd).st_size)
    return ((place.name, place.view(memory)) for place in places)


def _nameless_file() -> IO[bytes]:
    """Return a file in memory where the system can do that, else in the folder for temporary files; unbuffered."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tandem-weights"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _no_memory(error: OSError, nbytes: int) -> WriteError:
    """Return the error that the file can't grow to so many bytes: it is in memory, and no folder of the run is to
    blame.
    """
    size = f"the memory in which new weights are handed on can't grow to {nbytes / 1e6:.0f} MB ({error.strerror})"
    if error.errno == errno.EFBIG:
        return WriteError(f"{size}: files may be no larger here, and it counts as one. Raise the limit (ulimit -f)")
    return WriteError(f"{size}. Free some memory, or raise its limit (ulimit -v, that of the container)")


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
