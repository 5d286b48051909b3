"""Keys and values of rows that grow by one token a step, and the two layouts that fill and read them.

Rows lie left-aligned: the token at position p of a row is at column p, so a position is the same number whatever shares
the batch. Rows in use are always the first ``count`` ones: a row that ends is replaced by a later one, never by a copy
of the batch. Memory grows by doubling, so a token is copied a constant number of times, however long its row becomes.
"""

from __future__ import annotations

import torch
from torch import nn

from tandem.base.errors import ContractError
from tandem.models.packing import PackedLayout

_BLOCK = 64  # columns; keeps row starts aligned and growth rare


class KVCache:
    """Per layer ``keys`` and ``values`` (rows, K, capacity, D), allocated when a layer first attends.

    ``lengths`` (rows,) int64 on the CPU: tokens that each row holds. Only the first ``count`` rows are in use.
    """

    def __init__(self, rows: int = 1, capacity: int = _BLOCK) -> None:
        self.rows = rows
        self.capacity = _rounded(capacity)
        self.count = 0
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def longest(self) -> int:
        """Tokens of the longest row in use."""
        return int(self.lengths[: self.count].max()) if self.count else 0

    def clear(self) -> None:
        """Forget all rows; the memory stays."""
        self.count = 0

    def append(self, prompt_lengths: torch.Tensor, copies: int) -> PromptLayout:
        """Take ``copies`` new rows for each prompt (P,); the forward of the returned layout fills them."""
        first = self.count
        added = len(prompt_lengths) * copies
        self._reserve(first + added, int(prompt_lengths.max()))
        self.lengths[first : first + added] = prompt_lengths.repeat_interleave(copies)
        self.count = first + added
        return PromptLayout(self, first, prompt_lengths, copies)

    def extend(self) -> DecodeLayout:
        """Make room for one more token in every row; the forward of the returned layout writes it."""
        self._reserve(self.count, self.longest + 1)
        layout = DecodeLayout(self, self.lengths[: self.count].clone())
        self.lengths[: self.count] += 1
        return layout

    def move(self, source: torch.Tensor, target: torch.Tensor, count: int) -> None:
        """Overwrite the rows ``target`` by the rows ``source`` (M,), then keep the first ``count`` rows."""
        if len(source):
            self.lengths[target] = self.lengths[source]
            width = int(self.lengths[target].max())
            for keys, values in self._layers.values():
                for store in (keys[:, :, :width], values[:, :, :width]):
                    store[target.to(store.device)] = store[source.to(store.device)]
        self.count = count

    def layer(self, index: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (rows, K, capacity, D) of a layer; ``like`` (1, K, T, D) gives their size, dtype and device.

        Under mixed precision rotated keys are float32 beside bfloat16 values: give the values, whose type both get.
        """
        if index not in self._layers:
            self._layers[index] = (self._allocate(like), self._allocate(like))
        return self._layers[index]

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, because a masked column still enters a product with weight 0, where leftover NaN bits would not vanish.
        return like.new_zeros(self.rows, like.shape[1], self.capacity, like.shape[3])

    def _reserve(self, rows: int, capacity: int) -> None:
        if rows <= self.rows and capacity <= self.capacity:
            return
        width = self.longest
        if rows > self.rows:
            self.rows = max(rows, 2 * self.rows)
            grown = torch.zeros(self.rows, dtype=torch.int64)
            grown[: self.count] = self.lengths[: self.count]
            self.lengths = grown
        if capacity > self.capacity:
            self.capacity = _rounded(max(capacity, 2 * self.capacity))
        for index, stores in self._layers.items():
            fresh = (self._allocate(stores[0]), self._allocate(stores[1]))
            for new, old in zip(fresh, stores, strict=True):
                new[: self.count, :, :width] = old[: self.count, :, :width]
            self._layers[index] = fresh


class PromptLayout:
    """Packed prompts that see only themselves and leave their keys and values in new rows of a cache."""

    def __init__(self, cache: KVCache, first: int, lengths: torch.Tensor, copies: int) -> None:
        self._cache, self._first, self._copies = cache, first, copies
        self._packed = PackedLayout.of_lengths(lengths)
        self._width = int(lengths.max())
        ends = lengths.cumsum(0)
        self.last = ends - 1  # (P,): row positions of each prompt's last token
        self.positions = torch.arange(int(ends[-1])) - (ends - lengths).repeat_interleave(lengths)
        columns = torch.arange(self._width)[None].minimum(lengths[:, None] - 1)
        self._index = ((ends - lengths)[:, None] + columns).flatten()  # (P · width,), padded with the last token

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
        index = self._index.to(key.device)
        rows = slice(self._first, self._first + len(self.last) * self._copies)
        for store, new in zip(self._cache.layer(layer, value), (key, value), strict=True):
            padded = new[0].index_select(1, index).unflatten(1, (-1, self._width))  # (K, P, width, D)
            target = store[rows].unflatten(0, (-1, self._copies))[:, :, :, : self._width]
            target.copy_(padded.transpose(0, 1)[:, None])
        return self._packed.attend(layer, query, key, value, scale, window)


class DecodeLayout:
    """One new token per row: it is written behind the row's tokens and sees all of them, itself included.

    ``positions`` (R,) int64 on the CPU: where each row's new token stands.
    """

    def __init__(self, cache: KVCache, positions: torch.Tensor) -> None:
        self.positions = positions
        self._cache = cache
        self._rows = torch.arange(len(positions))
        self._width = int(positions.max()) + 1
        self._ragged = int(positions.min()) + 1 < self._width
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """See ``AttentionLayout.attend``, T = R: (1, H, R, D) and (1, K, R, D) to (1, R, H, D)."""
        heads, count, size = query.shape[1:]
        shared = key.shape[1]
        if count != len(self.positions):
            raise ContractError(f"{count} tokens came to a cache of {len(self.positions)} rows: one token per row")
        keys, values = self._cache.layer(layer, value)
        keys[self._rows, :, self.positions] = key[0].transpose(0, 1).to(keys.dtype)
        values[self._rows, :, self.positions] = value[0].transpose(0, 1)
        # The queries that share a key head stand as its sequence, so grouped heads need no expanded copy of the cache.
        grouped = query[0].to(keys.dtype).unflatten(0, (shared, -1)).permute(2, 0, 1, 3)  # (R, K, H / K, D)
        output = nn.functional.scaled_dot_product_attention(
            grouped,
            keys[:count, :, : self._width],
            values[:count, :, : self._width],
            attn_mask=self._mask(window, value),
            scale=scale,
        )
        return output.reshape(1, count, heads, size)

    def _mask(self, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
        """(R, 1, 1, width) additive mask, or None where every row sees every column; built once for all layers."""
        if window is not None and window >= self._width:
            window = None
        if window not in self._masks:
            self._masks[window] = None
            if self._ragged or window is not None:
                distance = self.positions[:, None] - torch.arange(self._width)
                hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
                mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -torch.inf)
                self._masks[window] = mask[:, None, None].to(like.device)
        return self._masks[window]


def _rounded(columns: int) -> int:
    return -(-columns // _BLOCK) * _BLOCK
