"""What a simulated device counts: bytes that its tensors hold, and copies between it and the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakValueDictionary

import torch

Direction = Literal["to_host", "to_device", "between"]


@dataclass(frozen=True)
class Copy:
    """A copy of ``size`` bytes by the operation ``by``. The number of a 0-dimensional tensor that Python asks for is
    one too, as is a result whose shape depends on values: on a real device both wait for everything before them."""

    direction: Direction
    size: int
    by: str


@dataclass
class Account:
    """Bytes of one device. ``limit``: more than that is refused, as by a device that is full."""

    index: int
    limit: int = 1 << 62
    allocated: int = 0
    peak: int = 0
    copies: list[Copy] = field(default_factory=list)

    def take(self, size: int) -> None:
        """Count ``size`` bytes more. Raises ``torch.OutOfMemoryError`` above the limit."""
        if self.allocated + size > self.limit:
            raise torch.OutOfMemoryError(
                f"sim:{self.index} is out of memory: {self.allocated} of {self.limit} bytes are taken, {size} asked for"
            )
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    @contextmanager
    def watched(self) -> Iterator[list[Copy]]:
        """The copies that are made in the block."""
        before, self.copies = self.copies, []
        try:
            yield self.copies
        finally:
            self.copies = before + self.copies

    def reset_peak(self) -> None:
        """Measure the peak from here on."""
        self.peak = self.allocated


class Held:
    """The memory of one storage on a device, given back when no tensor there uses it any more."""

    def __init__(self, account: Account, storage: torch.UntypedStorage) -> None:
        self._storage = storage  # so that no other tensor gets its address meanwhile
        self._account, self._size = account, 0
        with _lock:
            account.take(storage.nbytes())
            self._size = storage.nbytes()

    def __del__(self) -> None:
        with _lock:
            self._account.allocated -= self._size


_lock = threading.RLock()  # a tensor may be collected while another one is counted
_held: WeakValueDictionary[tuple[int, int], Held] = WeakValueDictionary()


def hold(account: Account, tensor: torch.Tensor) -> Held:
    """What keeps the memory of ``tensor``, which lies on the CPU, counted on the device of ``account``."""
    storage = tensor.untyped_storage()
    key = (account.index, storage.data_ptr())
    with _lock:
        found = _held.get(key) if storage.nbytes() else None
        if found is None:
            found = Held(account, storage)
            if storage.nbytes():
                _held[key] = found
    return found
