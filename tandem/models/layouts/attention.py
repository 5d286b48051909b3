"""One attention function for every way of laying tokens out.

Tandem never pads the linear layers of a model: tokens of many documents stand in one row ``(1, T)``. Which token may
see which, and where keys and values live, is the business of a *layout*: packed documents in training, a growing cache
in generation. The layout travels as a keyword argument through the transformers forward to each attention layer.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from tandem.base.errors import TandemError

IMPLEMENTATION = "tandem"


class Decoder(Protocol):
    """What makes hidden states of tokens: a model of transformers, or a ``Sighted`` one."""

    @property
    def config(self) -> Any:
        """What transformers says of it."""

    @property
    def forward(self) -> Callable[..., Any]:
        """The method whose signature says what it takes."""

    def __call__(self, *, input_ids: torch.Tensor, **options: Any) -> Any:
        """Run tokens (B, T) through all layers; what it gives has ``last_hidden_state`` (B, T, d)."""


class Layout(Protocol):
    """How T tokens in a row go through a decoder. ``PackedLayout`` puts documents one after the other."""

    def hidden(self, decoder: Decoder, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run ``decoder`` over ``input_ids`` and ``positions`` (T,) int64; its last hidden states (T, d).

        Positions on three axes are (3, T).
        """


class AttentionLayout(ABC):
    """A layout that decides, in each attention layer, who sees whom among the T tokens of one row."""

    def hidden(self, decoder: Decoder, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states (T, d) of tokens that stand in one row; each attention layer calls
        ``attend``.
        """
        places = positions.unsqueeze(-2)  # (1, T), or (3, 1, T)
        output = decoder(input_ids=input_ids[None], position_ids=places, use_cache=False, layout=self)
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    @abstractmethod
    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Compute causal attention within each document.

        ``query`` (1, H, T, D), ``key`` (1, K, T, D) and ``value`` (1, K, T, E) with H a multiple of K (grouped
        queries). ``window`` is the number of latest positions that a token may see (itself included), None for all.
        Returns (1, T, H, E).
        """


@dataclass
class Seen:
    """What a forward asked of attention: the windows of its masks, and those that reached its layers."""

    masks: set[int | None] = field(default_factory=set)
    layers: set[int | None] = field(default_factory=set)


_watching = threading.local()
_watchers = threading.RLock()  # one at a time: what is registered is so for all threads


@contextmanager
def watched() -> Iterator[Seen]:
    """Note the windows of all forwards of this thread in the block.

    A mask may say more than a layer passes on (chunks instead of windows, say), which short documents don't show.
    """
    _watching.seen = seen = Seen()
    with _watchers:
        AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
        try:
            yield seen
        finally:
            _watching.seen = None
            # Asked for a mask, transformers looks first whether documents are packed, which waits for the device. It
            # doesn't where an attention is none that has masks.
            AttentionMaskInterface._global_mapping.pop(IMPLEMENTATION, None)


def layout_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    layout: AttentionLayout | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """Return the function that transformers calls in each attention layer; delegates to the ``layout`` keyword."""
    name = type(module).__name__
    if layout is None:
        raise TandemError(f"{name} does not pass on where documents begin and end")
    if attention_mask is not None:
        raise TandemError(f"{name} gets a mask of its own making")
    for feature in ("softcap", "s_aux", "position_bias"):
        if extra.get(feature) is not None:
            raise TandemError(f"{name} uses the attention feature {feature!r}")
    if dropout:
        raise TandemError(f"attention dropout {dropout} is not supported: set it to 0 in the model's config")
    seen: Seen | None = getattr(_watching, "seen", None)
    if seen is not None:
        seen.layers.add(sliding_window or None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layout.attend(module.layer_idx, query, key, value, scale, sliding_window), None  # type: ignore[arg-type]


def _no_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> None:
    """Build no mask in transformers: layouts know who sees whom."""
    seen: Seen | None = getattr(_watching, "seen", None)
    if seen is not None:
        seen.masks.add(local_size or None)  # some families write 0 for no window


AttentionInterface.register(IMPLEMENTATION, layout_attention)
