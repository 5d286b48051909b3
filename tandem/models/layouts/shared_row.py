"""One packed row on several ranks: each computes some of its tokens, and in attention all of them for some heads.

That is DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509): before attention the ranks exchange tokens for heads, and
after it heads for tokens. Nothing else in a layer looks from token to token, so nothing else knows of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tandem.models.layouts.attention import AttentionLayout, Decoder
from tandem.models.layouts.packing import PackedLayout


@dataclass(frozen=True)
class Share:
    """The part of each row that this rank of ``group`` computes: the ``place``-th of ``ranks`` equal stretches."""

    group: dist.ProcessGroup
    place: int
    ranks: int

    def width(self, tokens: int) -> int:
        """Return how many tokens each rank computes of a row of ``tokens``; those behind its end are fillers."""
        return -(-tokens // self.ranks)

    def own(self, read: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of the places ``read`` (N,) in a row of ``tokens`` are here, (M,), and where here, (M,)."""
        width = self.width(tokens)
        mine = (read // width == self.place).nonzero()[:, 0]
        return mine, read[mine] - width * self.place

    def joined(self, values: torch.Tensor, mine: torch.Tensor, count: int) -> torch.Tensor:
        """Return what all ranks read, (count, ...), from the ``values`` (M, ...) that this one read for ``mine``.

        Each rank's values get the gradient of their places.
        """
        whole = values.new_zeros(count, *values.shape[1:]).index_copy(0, mine, values)
        joined: torch.Tensor = _Joined.apply(whole, self.group)  # type: ignore[no-untyped-call]
        return joined


class SharedRow(AttentionLayout):
    """A ``layout`` of whole rows, of which each rank has the tokens of its ``share``."""

    def __init__(self, layout: PackedLayout, share: Share) -> None:
        self._layout, self._tokens, self._share = layout, layout.tokens, share
        self._fillers = share.width(self._tokens) * share.ranks - self._tokens

    def hidden(self, decoder: Decoder, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states (W, d) of this rank's tokens, of all ``input_ids`` (T,)."""
        padded = (nn.functional.pad(row, (0, self._fillers)) for row in (input_ids, positions))
        return super().hidden(decoder, *(row.chunk(self._share.ranks)[self._share.place] for row in padded))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Attend as the whole layout does: (1, H, W, D), (1, K, W, D) and (1, K, W, E) give (1, W, H, E)."""
        query, key, value = (self._heads(rows[0])[None, :, : self._tokens] for rows in (query, key, value))
        found = self._layout.attend(layer, query, key, value, scale, window)[0]
        return self._rows(nn.functional.pad(found, (0, 0, 0, 0, 0, self._fillers)))[None]

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        """Turn all heads of this rank's tokens (H, W, D) into some heads of all tokens (H / ranks, W * ranks, D)."""
        parts = self._exchanged(rows.unflatten(0, (self._share.ranks, -1)))
        return parts.transpose(0, 1).flatten(1, 2)

    def _rows(self, heads: torch.Tensor) -> torch.Tensor:
        """Turn some heads of all tokens (W * ranks, H / ranks, E) into all heads of this rank's tokens (W, H, E)."""
        parts = self._exchanged(heads.unflatten(0, (self._share.ranks, -1)))
        return parts.transpose(0, 1).flatten(1, 2)

    def _exchanged(self, parts: torch.Tensor) -> torch.Tensor:
        exchanged: torch.Tensor = _Exchanged.apply(parts, self._share.group)  # type: ignore[no-untyped-call]
        return exchanged


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send ``parts[r]`` to rank r, and return what comes: from rank r as ``[r]``."""
    parts = parts.contiguous()
    came = torch.empty_like(parts)
    dist.all_to_all_single(came, parts, group=group)
    return came


class _Exchanged(torch.autograd.Function):
    """``_exchange``, which is its own inverse."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(grad, ctx.group), None


class _Joined(torch.autograd.Function):
    """The sum over ranks, of which no two have something in one place."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
