"""Prefilling groups whose samples have begun: the prompt once, and behind it what each sample has of its own."""

from __future__ import annotations

import torch

from tandem.models.cache import KVCache, KVStore
from tandem.models.packing import Documents, PackedLayout


class ResumptionLayout:
    """Packed prompts (P of them), then the R answers begun to them; each answer sees its prompt and itself.

    Taking it makes rows in ``cache``: the forward leaves keys and values in the prompts' rows and the answers' rows.
    ``lengths`` (P,) and ``copies`` (P,): tokens of each prompt, and how many answers go on behind it. ``begun`` (R,):
    tokens of each answer, which may be 0. All int64 on the CPU.
    """

    def __init__(self, cache: KVCache, lengths: torch.Tensor, copies: torch.Tensor, begun: torch.Tensor) -> None:
        prompt = torch.arange(len(lengths)).repeat_interleave(copies)  # (R,): of each answer
        starts = lengths.cumsum(0) - lengths
        own = lengths.sum() + begun.cumsum(0) - begun
        rows = cache.prompts.append(lengths, int(lengths.max()))
        cache.group = torch.cat([cache.group, prompt + rows.start])
        answers = cache.answers.append(begun, max(int(begun.max()), 1))
        self._parts = [
            _Part(cache.prompts, rows, starts, lengths, cache.device),
            _Part(cache.answers, answers, own, begun, cache.device),
        ]
        self._packed = PackedLayout(Documents(starts[prompt], lengths[prompt], own, begun), cache.device)
        behind = torch.cat(
            [torch.zeros_like(lengths), lengths[prompt]]
        )  # where each stretch of the row begins to count
        stretches = torch.cat([lengths, begun])
        place = torch.arange(int(stretches.sum())) - (stretches.cumsum(0) - stretches).repeat_interleave(stretches)
        self.positions = place + behind.repeat_interleave(stretches)
        self.last = torch.where(begun > 0, own + begun, (starts + lengths)[prompt]) - 1  # (R,): last token of each

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """See ``AttentionLayout.attend``: (1, H, T, D) and (1, K, T, D) to (1, T, H, D)."""
        for part in self._parts:
            part.keep(layer, key, value)
        return self._packed.attend(layer, query, key, value, scale, window)


class _Part:
    """Stretches of the packed row that go to the rows ``rows`` of a store."""

    def __init__(
        self, store: KVStore, rows: slice, starts: torch.Tensor, lengths: torch.Tensor, device: torch.device
    ) -> None:
        self._store, self._rows = store, rows
        self._width = int(lengths.max())
        # A short stretch repeats its last token; an empty one takes whatever stands before it. Neither is ever seen.
        columns = torch.arange(self._width)[None].minimum(lengths[:, None] - 1)
        self._index = (starts[:, None] + columns).flatten().to(device)

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values (1, K, T, D) of the stretches."""
        if self._width == 0:
            return
        for store, new in zip(self._store.layer(layer, value), (key, value), strict=True):
            padded = new[0].index_select(1, self._index).unflatten(1, (-1, self._width))  # (K, rows, width, D)
            store[self._rows, :, : self._width] = padded.transpose(0, 1)
