"""Bytes of tensors that live at once, counted and not measured: the same on every machine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Inside this context ``peak`` becomes the most bytes of new storages that were alive at one moment."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        old = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf):
                self._count(leaf.untyped_storage(), old)
        self.peak = max(self.peak, sum(self._live.values()))
        return result

    def _count(self, storage: Any, old: set[int]) -> None:
        place = storage.data_ptr()
        if place in old or place in self._live:
            return
        self._live[place] = storage.nbytes()
        weakref.finalize(storage, self._live.pop, place, None)
