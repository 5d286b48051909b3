"""Keys and values of generated rows, in memory that grows with them and is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from weakref import WeakSet

import torch

from tandem.base.errors import ContractError
from tandem.models.kv_cost import COLUMNS, columns
from tandem.models.layouts.attention import AttentionLayout

BLOCK = COLUMNS
_SHARE = 8  # memory grows by this part of itself at least, so a token is copied about so many times, however long a row
Place = tuple[int, int]
"""A layer, and which of its calls within a forward: some models attend twice in a layer, or run layers again."""


class KVPool:
    """The memory of several stores. ``slots``: most tokens, padding included, that there is room for; None: any."""

    def __init__(self, slots: int | None = None) -> None:
        self.slots = slots
        self._stores: WeakSet[KVStore] = WeakSet()

    @property
    def allocated(self) -> int:
        """Tokens that stores have room for."""
        return sum(store.allocated for store in self._stores)

    def add(self, store: KVStore) -> None:
        """Count the memory of ``store``, too."""
        self._stores.add(store)

    def shape(self, store: KVStore, wanted: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """Return the first of the ``wanted`` (rows, columns) that there is room for beside the other stores.

        These give up what they don't use where the last, which is the least that the store can do with, asks for it.
        Raises ``ContractError`` where that is too little: rows were let in without room for them.
        """
        shapes = list(wanted)
        if self.slots is None:
            return shapes[0]
        others = [other for other in self._stores if other is not store]
        for give in (False, True):
            for other in others if give else ():
                other.tighten()
            room = self.slots - sum(other.allocated for other in others)
            found = next(((rows, width) for rows, width in shapes if rows * width <= room), None)
            if found is not None:
                return found
        rows, width = shapes[-1]
        raise ContractError(f"keys and values of {rows} rows of {width} tokens don't fit {room} tokens that are left")


class KVStore:
    """Keys (rows, K, capacity, D) and values (rows, K, capacity, E) per place, allocated at its first write.

    ``lengths`` (rows,) int64 on the CPU: tokens in each row. Only the first ``count`` rows are in use.
    """

    def __init__(self, rows: int, capacity: int, pool: KVPool | None = None) -> None:
        self.rows, self.capacity = rows, columns(capacity)
        self.count = 0
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        self._layers: dict[Place, tuple[torch.Tensor, torch.Tensor]] = {}
        self._pool = KVPool() if pool is None else pool
        self._pool.add(self)

    @property
    def width(self) -> int:
        """Tokens of the longest row in use."""
        return int(self.lengths[: self.count].max()) if self.count else 0

    @property
    def allocated(self) -> int:
        """Tokens that there is room for, or will be with the first write to each place."""
        return self.rows * self.capacity if self.count or self._layers else 0

    def sizes(self) -> list[int]:
        """Return the bytes of each tensor."""
        return [store.nbytes for pair in self._layers.values() for store in pair]

    def append(self, lengths: torch.Tensor, capacity: int) -> slice:
        """Take new rows of ``lengths`` (M,), with columns for ``capacity`` tokens; says which rows they are."""
        rows = slice(self.count, self.count + len(lengths))
        self.reserve(rows.stop, capacity)
        self.lengths[rows] = lengths
        self.count = rows.stop
        return rows

    def reserve(self, rows: int, capacity: int) -> None:
        """Have at least so many rows and columns."""
        if self.allocated and rows <= self.rows and capacity <= self.capacity:
            return
        most_rows = self.rows if rows <= self.rows else max(rows, self.rows + self.rows // _SHARE)
        wide = self.capacity if capacity <= self.capacity else max(capacity, self.capacity + self.capacity // _SHARE)
        least_rows, least = max(rows, self.count, 1), columns(max(capacity, self.width, 1))
        shapes = [(r, c) for r in (most_rows, least_rows) for c in (columns(wide), least)]
        self._resize(*self._pool.shape(self, shapes))

    def tighten(self) -> None:
        """Give up what no row in use needs."""
        if not self.count:
            self._layers.clear()
        elif (self.count, columns(self.width)) != (self.rows, self.capacity):
            self._resize(self.count, columns(max(self.width, 1)))

    def _resize(self, rows: int, capacity: int) -> None:
        """Have so many rows and columns. One tensor after the other is copied, so that one alone is there twice."""
        width, lengths = self.width, self.lengths[: self.count]
        if rows != self.rows:
            self.lengths = torch.zeros(rows, dtype=torch.int64)
            self.lengths[: self.count] = lengths
        self.rows, self.capacity = rows, capacity
        for place in list(self._layers):
            stores = list(self._layers.pop(place))
            for i in range(len(stores)):
                fresh = self._allocate(stores[i], stores[i])
                fresh[: self.count, :, :width] = stores[i][: self.count, :, :width]
                stores[i] = fresh
                del fresh
            self._layers[place] = (stores[0], stores[1])

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
