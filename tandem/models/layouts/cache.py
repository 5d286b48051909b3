"""Keys and values of generated rows, and the two layouts that fill and read them.

Rows lie left-aligned: a token's column is its place in the row, so positions never depend on what shares the batch.
Rows in use are always the first ``count`` ones: one that ends is replaced by a later one, never by a copy of the batch.
Memory grows by a part of itself, so a token is copied a constant number of times, however long its row becomes; where
it is bounded, whoever lets rows in sees to it that they fit at their longest.

The samples of a group share the keys and values of their prompt: these are stored once, and read once a step for all
samples, whose queries stand together as one product (Juravsky et al. 2024, "Hydragen").
"""

from __future__ import annotations

import torch

from tandem.base.errors import ContractError
from tandem.models.kv_cost import KVCost
from tandem.models.layouts.kv_store import BLOCK, KVPool, KVStore, Place, StoringLayout, closing
from tandem.models.layouts.packing import Documents, PackedLayout


class KVCache:
    """Rows of samples: ``answers`` holds what is each one's own, ``prompts`` what the samples of a group share.

    A prompt with a single sample is not shared: it stands in the sample's own row. ``group`` (rows of ``answers``,)
    int64 says which row of ``prompts`` a sample continues, where ``prompts`` is in use. Lengths and rows are kept on
    the CPU, keys and values on ``device``, in memory of ``pool``.
    """

    def __init__(self, device: torch.device, rows: int = 1, capacity: int = BLOCK, pool: KVPool | None = None) -> None:
        self.device = device
        self.answers = KVStore(rows, capacity, pool)
        self.prompts = KVStore(1, BLOCK, pool)
        self.group = torch.zeros(0, dtype=torch.int64)

    @property
    def count(self) -> int:
        """The number of rows in use."""
        return self.answers.count

    def cost(self) -> KVCost:
        """Return what a token costs, once one was written."""
        width = self.answers.allocated
        sizes = [size // width for size in self.answers.sizes()]
        return KVCost(sum(sizes), max(sizes, default=0))

    def append(self, lengths: torch.Tensor, copies: int) -> PromptLayout:
        """Take ``copies`` new rows for each prompt (P,); the forward of the returned layout fills them.

        ``copies`` must be the same, or at least on the same side of 1, for all rows in use.
        """
        width = int(lengths.max())
        if copies == 1:
            return PromptLayout(self.answers, self.answers.append(lengths, width), lengths, self.device)
        rows = self.prompts.append(lengths, width)
        self.group = torch.cat([self.group, torch.arange(rows.start, rows.stop).repeat_interleave(copies)])
        self.answers.append(torch.zeros(len(lengths) * copies, dtype=torch.int64), 1)
        return PromptLayout(self.prompts, rows, lengths, self.device)

    def resume(self, lengths: torch.Tensor, copies: torch.Tensor, begun: torch.Tensor) -> ResumptionLayout:
        """Return the layout that runs prompts and the beginnings of their answers, and appends those rows to the
        cache.
        """
        return ResumptionLayout(self, lengths, copies, begun)

    def extend(self) -> DecodeLayout:
        """Make room for one more token in every row; the forward of the returned layout writes it."""
        answers = self.answers
        answers.reserve(answers.count, answers.width + 1)
        layout = DecodeLayout(self, answers.lengths[: answers.count].clone())
        answers.lengths[: answers.count] += 1
        return layout

    def move(self, source: torch.Tensor, target: torch.Tensor, count: int) -> None:
        """Overwrite the rows ``target`` by the rows ``source`` (M,), then keep the first ``count`` rows.

        A prompt that no row continues any more leaves in the same way.
        """
        self.answers.move(source, target, count)
        if not self.prompts.count:
            return
        self.group[target] = self.group[source]
        self.group = self.group[:count]
        used = torch.zeros(self.prompts.count, dtype=torch.bool)
        used[self.group] = True
        if not bool(used.all()):
            source, target = closing(used)
            renamed = torch.arange(len(used))
            renamed[source] = target
            self.group = renamed[self.group]
            self.prompts.move(source, target, int(used.sum()))


class PromptLayout(StoringLayout):
    """Packed prompts that see only themselves and leave their keys and values in ``rows`` of a store."""

    def __init__(self, store: KVStore, rows: slice, lengths: torch.Tensor, device: torch.device) -> None:
        super().__init__()
        self._store, self._rows = store, rows
        self._packed = PackedLayout.of_lengths(lengths, device)
        self._width = int(lengths.max())
        ends = lengths.cumsum(0)
        starts = ends - lengths
        self.last = ends - 1  # (P,): where each prompt's last token stands in the packed row
        self.positions = torch.arange(int(ends[-1])) - starts.repeat_interleave(lengths)
        columns = torch.arange(self._width)[None].minimum(lengths[:, None] - 1)
        index = (starts[:, None] + columns).flatten()  # (P · width,), padded with the last token
        self._index = index.to(device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Keep the prompts' keys and values; (1, H, T, D), (1, K, T, D) and (1, K, T, E) give (1, T, H, E)."""
        for store, new in zip(self._store.layer(self.place(layer), key, value), (key, value), strict=True):
            padded = new[0].index_select(1, self._index).unflatten(1, (-1, self._width))  # (K, P, width, D)
            store[self._rows, :, : self._width] = padded.transpose(0, 1)
        return self._packed.attend(layer, query, key, value, scale, window)


class ResumptionLayout(StoringLayout):
    """Packed prompts (P of them), then the R answers begun to them; each answer sees its prompt and itself.

    Taking it makes rows in ``cache``: the forward leaves keys and values in the prompts' rows and the answers' rows.
    ``lengths`` (P,) and ``copies`` (P,): tokens of each prompt, and how many answers go on behind it. ``begun`` (R,):
    tokens of each answer, which may be 0. All int64 on the CPU.
    """

    def __init__(self, cache: KVCache, lengths: torch.Tensor, copies: torch.Tensor, begun: torch.Tensor) -> None:
        super().__init__()
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
        """Keep keys and values of prompts and beginnings.

        From (1, H, T, D), (1, K, T, D), (1, K, T, E) to (1, T, H, E).
        """
        place = self.place(layer)
        for part in self._parts:
            part.keep(place, key, value)
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

    def keep(self, place: Place, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys (1, K, T, D) and values (1, K, T, E) of the stretches."""
        if self._width == 0:
            return
        for store, new in zip(self._store.layer(place, key, value), (key, value), strict=True):
            padded = new[0].index_select(1, self._index).unflatten(1, (-1, self._width))  # (K, rows, width, D)
            store[self._rows, :, : self._width] = padded.transpose(0, 1)


class DecodeLayout(StoringLayout):
    """One new token per row: it is written behind the row's tokens and sees all of them, itself included.

    ``positions`` (R,) int64 on the CPU: where each row's new token stands, its prompt counted.
    """

    def __init__(self, cache: KVCache, columns: torch.Tensor) -> None:
        super().__init__()
        self._answers, self._columns = cache.answers, columns
        self._width = int(columns.max()) + 1
        self._at = (torch.arange(len(columns)).to(cache.device), slice(None), columns.to(cache.device))
        self._shared = _SharedPrompts(cache.prompts, cache.group, cache.device) if cache.prompts.count else None
        self.positions = columns if self._shared is None else columns + self._shared.lengths
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
        """Attend from one token per row to its cache: (1, H, R, D), (1, K, R, D) and (1, K, R, E) give (1, R, H, E)."""
        heads, count, size = query.shape[1:]
        place = self.place(layer)
        if count != len(self.positions):
            raise ContractError(f"{count} tokens came to a cache of {len(self.positions)} rows: one token per row")
        keys, values = self._answers.layer(place, key, value)
        keys[self._at] = key[0].transpose(0, 1).to(keys.dtype)
        values[self._at] = value[0].transpose(0, 1)
        # The queries that share a key head stand as its sequence, so grouped heads need no expanded copy of the cache.
        queries = (query[0] * scale).transpose(0, 1).to(keys.dtype).reshape(count, keys.shape[1], -1, size)
        scores = _product(queries, keys[:count, :, : self._width].transpose(2, 3))  # (R, K, H / K, width)
        if self._shared is not None:
            scores = torch.cat([self._shared.scores(place, queries, key, value), scores], -1)
        mask = self._mask(window, scores)
        weights = (scores if mask is None else scores + mask).softmax(-1, dtype=torch.float32).to(values.dtype)
        output = _product(weights[..., -self._width :], values[:count, :, : self._width])
        if self._shared is not None:
            output = output + self._shared.mixed(place, weights[..., : -self._width], key, value)
        return output.reshape(1, count, heads, value.shape[3])

    def _mask(self, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
        """Return the additive mask (R, 1, 1, columns), None where every row sees every column; built once for all
        layers.
        """
        if window not in self._masks:
            self._masks[window] = self._hiding(window, like) if self._hides(window) else None
        return self._masks[window]

    def _hides(self, window: int | None) -> bool:
        """Say whether a row may not see some column, from the lengths that the CPU knows."""
        shorter = int(self._columns.min()) + 1 < self._width
        shorter |= self._shared is not None and int(self._shared.lengths.min()) < self._shared.width
        return shorter or (window is not None and int(self.positions.max()) >= window)

    def _hiding(self, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """Build the mask where it is used: on the CPU it would cost more than a model's step, and a copy."""
        columns = self._at[2][:, None]
        place = torch.arange(self._width, device=like.device)
        hidden, distance = place > columns, columns - place
        if self._shared is not None:
            prompts = self._shared.lengths.to(like.device)[:, None]
            place = torch.arange(self._shared.width, device=like.device)
            hidden = torch.cat([place >= prompts, hidden], 1)
            distance = torch.cat([columns + prompts - place, distance], 1)
        if window is not None:
            hidden |= distance >= window
        mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
        return mask[:, None, None]


class _SharedPrompts:
    """The shared part of a step's attention: the m rows at most of each of G groups side by side, padded by others."""

    def __init__(self, store: KVStore, group: torch.Tensor, device: torch.device) -> None:
        self._store, self._groups = store, store.count
        self.width = store.width
        self.lengths = store.lengths[group]  # (R,)
        sizes = torch.bincount(group, minlength=store.count)
        self._members = int(sizes.max())
        order = group.argsort(stable=True)
        rank = torch.arange(len(group)) - (sizes.cumsum(0) - sizes)[group[order]]
        place = torch.empty_like(group)  # (R,): where in (G · m,) a row stands
        place[order] = group[order] * self._members + rank
        row = torch.zeros(self._groups * self._members, dtype=torch.int64)  # (G · m,): the row that stands there
        row[place] = torch.arange(len(group))
        self._place, self._row = place.to(device), row.to(device)

    def scores(self, place: Place, queries: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Turn (R, K, H / K, D) into (R, K, H / K, width): each query times its prompt's keys."""
        keys, _ = self._store.layer(place, key, value)
        return self._product(queries, keys[: self._groups, :, : self.width].transpose(2, 3))

    def mixed(self, place: Place, weights: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Turn (R, K, H / K, width) into (R, K, H / K, E): the prompt's values by weight."""
        _, values = self._store.layer(place, key, value)
        return self._product(weights, values[: self._groups, :, : self.width])

    def _product(self, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Multiply rows (R, K, H / K, a) by the matrices of their groups (G, K, a, b), giving (R, K, H / K, b)."""
        heads, each = rows.shape[1:3]
        grouped = rows[self._row].unflatten(0, (self._groups, self._members))
        product = _product(grouped.transpose(1, 2).flatten(2, 3), matrices)  # (G, K, m · H / K, b)
        apart = product.unflatten(2, (self._members, each)).transpose(1, 2)  # (G, m, K, H / K, b)
        ungrouped: torch.Tensor = apart.reshape(-1, heads, each, product.shape[-1])[self._place]
        return ungrouped


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply the matrices (B, K, m, a) and (B, K, a, b), giving (B, K, m, b); views stay views, which ``matmul``
    copies.
    """
    product: torch.Tensor = torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).unflatten(0, left.shape[:2])
    return product
