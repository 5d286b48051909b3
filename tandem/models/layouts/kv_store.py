"""Keys and values of generated rows in memory that grows by doubling."""

from __future__ import annotations

from collections import Counter

import torch

from tandem.models.layouts.attention import AttentionLayout

BLOCK = 64  # columns; keeps row starts aligned and growth rare
Place = tuple[int, int]
"""A layer, and which of its calls within a forward: some models attend twice in a layer, or run layers again."""


class KVStore:
    """Keys (rows, K, capacity, D) and values (rows, K, capacity, E) per place, allocated at its first write.

    ``lengths`` (rows,) int64 on the CPU: tokens in each row. Only the first ``count`` rows are in use.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, _rounded(capacity)
        self.count = 0
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        self._layers: dict[Place, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def width(self) -> int:
        """Tokens of the longest row in use."""
        return int(self.lengths[: self.count].max()) if self.count else 0

    def append(self, lengths: torch.Tensor, capacity: int) -> slice:
        """Take new rows of ``lengths`` (M,), with columns for ``capacity`` tokens; says which rows they are."""
        rows = slice(self.count, self.count + len(lengths))
        self.reserve(rows.stop, capacity)
        self.lengths[rows] = lengths
        self.count = rows.stop
        return rows

    def reserve(self, rows: int, capacity: int) -> None:
        """Have at least so many rows and columns."""
        if rows <= self.rows and capacity <= self.capacity:
            return
        width, lengths = self.width, self.lengths[: self.count]
        if rows > self.rows:
            self.rows = max(rows, 2 * self.rows)
            self.lengths = torch.zeros(self.rows, dtype=torch.int64)
            self.lengths[: self.count] = lengths
        if capacity > self.capacity:
            self.capacity = _rounded(max(capacity, 2 * self.capacity))
        for place, stores in self._layers.items():
            fresh = tuple(self._allocate(store, store) for store in stores)
            for new, old in zip(fresh, stores, strict=True):
                new[: self.count, :, :width] = old[: self.count, :, :width]
            self._layers[place] = (fresh[0], fresh[1])

    def move(self, source: torch.Tensor, target: torch.Tensor, count: int) -> None:
        """Overwrite the rows ``target`` by the rows ``source`` (M,), then keep the first ``count`` rows."""
        if len(source):
            self.lengths[target] = self.lengths[source]
            width = int(self.lengths[target].max())
            stores = [store[:, :, :width] for pair in self._layers.values() for store in pair]
            if stores:  # the indices go to the device once, not once a layer
                source, target = source.to(stores[0].device), target.to(stores[0].device)
            for store in stores:
                store[target] = store[source]
        self.count = count

    def layer(self, place: Place, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored keys and values of a place; ``key`` (1, K, T, D) and ``value`` (1, K, T, E) give their
        sizes.

        Under mixed precision rotated keys are float32 beside bfloat16 values: both are stored as values come.
        """
        if place not in self._layers:
            self._layers[place] = (self._allocate(key, value), self._allocate(value, value))
        return self._layers[place]

    def _allocate(self, sized: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        # Zeros, because a hidden column still enters a product with weight 0, where leftover NaN bits would not vanish.
        return like.new_zeros(self.rows, sized.shape[1], self.capacity, sized.shape[3])


class StoringLayout(AttentionLayout):
    """A layout of one forward that writes keys and values to places of a store."""

    def __init__(self) -> None:
        self._calls: Counter[int] = Counter()

    def place(self, layer: int) -> Place:
        """Return the place in the store of this call of ``layer``."""
        self._calls[layer] += 1
        return layer, self._calls[layer]


def closing(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the moves that close the gaps in ``kept`` (M,) bool: rows ``source`` from the end go to the rows
    ``target``.
    """
    count = int(kept.sum())
    return kept[count:].nonzero()[:, 0] + count, (~kept[:count]).nonzero()[:, 0]


def _rounded(columns: int) -> int:
    return -(-columns // BLOCK) * BLOCK
