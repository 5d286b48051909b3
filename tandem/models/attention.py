"""One attention function for every way of laying tokens out.

Tandem never pads the linear layers of a model: tokens of many documents stand in one row ``(1, T)``. Which token may
see which, and where keys and values live, is the business of a *layout*: packed documents in training, a growing cache
in generation. The layout travels as a keyword argument through the transformers forward to each attention layer.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from tandem.base.errors import TandemError

IMPLEMENTATION = "tandem"


class AttentionLayout(Protocol):
    """Decides who sees whom among the T tokens of a forward."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention within each document.

        ``query`` (1, H, T, D), ``key`` and ``value`` (1, K, T, D) with H a multiple of K (grouped queries). ``window``
        is the number of latest positions that a token may see (itself included), None for all.
        Returns (1, T, H, D).
        """


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
    """The function that transformers calls in each attention layer; delegates to the ``layout`` keyword."""
    if layout is None:
        raise TandemError(
            f"{type(module).__name__} did not pass the attention layout on: this architecture does not forward keyword "
            "arguments to its attention layers and can't be used. Choose a decoder-only model of transformers ≥ 5"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if extra.get(name) is not None:
            raise TandemError(f"{type(module).__name__} uses the attention feature {name!r}, which is not supported")
    if dropout:
        raise TandemError(f"attention dropout {dropout} is not supported: set it to 0 in the model's config")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layout.attend(module.layer_idx, query, key, value, scale, sliding_window), None  # type: ignore[arg-type]


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Layouts know who sees whom; transformers builds no mask."""


AttentionInterface.register(IMPLEMENTATION, layout_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
