"""Weights in the dtype that products are computed in, kept over many forwards.

Autocast keeps what it has cast only of weights that have a gradient, and only until its context ends: frozen weights
below adapters it casts again for every token. What is kept here is the same cast, made once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

Weights = tuple[torch.Tensor, torch.Tensor | None]
"""The weight and the bias of a linear layer."""

_active = threading.local()


class CastWeights:
    """Cast weights of the linear layers of ``model`` for forwards without gradient: in ``dtype``, until ``forget``.

    ``frozen_only``: of layers that are never trained, so that whoever trains the others beside this sees their change.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, frozen_only: bool) -> None:
        self._dtype, self._kept = dtype, dict[nn.Linear, Weights]()
        self._chosen = {
            layer
            for layer in model.modules()
            if type(layer) is nn.Linear and not (frozen_only and any(p.requires_grad for p in layer.parameters()))
        }
        for layer in self._chosen:
            layer.forward = partial(_linear, layer)  # type: ignore[method-assign]

    def forget(self) -> None:
        """Let all casts go: the weights have changed, or their memory is wanted."""
        self._kept.clear()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let this thread's forwards in the block read the casts."""
        before, _active.casts = getattr(_active, "casts", None), self
        try:
            yield
        finally:
            _active.casts = before

    def of(self, layer: nn.Linear) -> Weights:
        """Return the cast weights of ``layer``, made now if they were not; its own where it is none of those chosen."""
        if layer not in self._chosen or isinstance(layer.weight, DTensor):
            return layer.weight, layer.bias
        if layer not in self._kept:
            bias: torch.Tensor | None = layer.bias
            cast = None if bias is None else bias.detach().to(self._dtype)
            self._kept[layer] = layer.weight.detach().to(self._dtype), cast
        return self._kept[layer]


def weights_of(layer: nn.Linear) -> Weights:
    """Return the weights that this thread's forwards read of ``layer``: its own, or casts of them."""
    casts: CastWeights | None = getattr(_active, "casts", None)
    return (layer.weight, layer.bias) if casts is None else casts.of(layer)


def _linear(layer: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(hidden, *weights_of(layer))
