"""Batches and other values on their way through Ray: tensors as flat bytes beside the pickle, never inside it."""

from __future__ import annotations

import io
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

with warnings.catch_warnings():
    # PyTorch warns once a process that a tensor over read-only memory must not be written to. What arrives here is
    # read-only by contract, so the warning is spent on a tensor that nobody sees.
    warnings.simplefilter("ignore")
    _EMPTY = np.empty(1, np.uint8)
    _EMPTY.flags.writeable = False
    torch.from_numpy(_EMPTY)


@dataclass(frozen=True)
class Packed:
    """A value ready to travel: ``head`` is its pickle, ``buffers`` are the bytes of its tensors and arrays.

    Ray moves the buffers without copying them into the pickle, and gives views of its shared memory where they arrive.
    """

    head: bytes
    buffers: tuple[Bytes, ...]

    def copied(self) -> Packed:
        """Return a copy in memory of this process, which outlives the sender."""
        return Packed(self.head, tuple(buffer.copy() for buffer in self.buffers))


def pack(value: Any) -> Packed:
    """Pack any value that can be pickled. Tensors come from wherever they are and arrive detached, on the CPU."""
    head, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(head, protocol=5, buffer_callback=buffers.append).dump(value)
    return Packed(head.getvalue(), tuple(np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers))


def unpack(packed: Packed) -> Any:
    """Return the value. Its tensors share the memory of the buffers: read only."""
    return pickle.loads(packed.head, buffers=packed.buffers)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        flat = obj.detach().cpu().contiguous().reshape(-1)
        data = pickle.PickleBuffer(flat.view(torch.uint8).numpy().data)
        return _tensor, (data, obj.dtype, tuple(obj.shape))


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    flat = np.asarray(data)  # of no elements, it has no stride that could be read as another dtype
    return torch.from_numpy(flat).view(dtype).view(shape) if flat.size else torch.empty(shape, dtype=dtype)
