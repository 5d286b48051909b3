"""One row per document, for models that mix tokens in ways of their own: right by construction, and slower.

A model runs as plain transformers runs it. What is packed in a row of tokens is laid out in rows before the decoder and
put back behind it, so that whoever packs and reads need not know. Rows are padded on the right, which no token of a
causal model sees.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig

from tandem.base.errors import TandemError
from tandem.models.layouts.attention import AttentionLayout, Decoder
from tandem.models.layouts.packing import Documents, PackedLayout, banded, causal_attention, windowed_attention

_CACHES = ("cache", "past_key_values", "cache_params", "state")
"""What decoders call their cache, in what they take and what they give."""


class RowsLayout:
    """Documents side by side, padded to the longest; prompts that are shared in the packed row are repeated."""

    def __init__(self, documents: Documents, device: torch.device | str = "cpu") -> None:
        width = int(documents.totals.max())
        index = documents.index(torch.arange(len(documents.totals)), width)  # (B, width)
        tokens = int(index.max()) + 1
        # A token may stand at several places: in each document of its prefix, and as padding. The first is a real one.
        places = torch.arange(index.numel())
        back = torch.full((tokens,), index.numel()).scatter_reduce(0, index.flatten(), places, "amin")
        self._index, self._back = index.to(device), back.to(device)

    def hidden(self, decoder: Decoder, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states (T, d), each document in a row of its own, counted from its first token unless
        positions have three axes.
        """
        places = _on_axes(positions, self._index)
        states = decoder(input_ids=input_ids[self._index], use_cache=False, **places).last_hidden_state
        return nn.functional.embedding(self._back, states.flatten(0, 1))


class BorderedLayout(PackedLayout):
    """Documents one after the other in one row, nothing shared, for layers that ask where each begins and ends."""

    def __init__(self, documents: Documents, device: torch.device | str = "cpu") -> None:
        super().__init__(documents, device)
        lengths = documents.totals
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
        longest = int(lengths.max())
        self._borders: dict[str, Any] = {
            "seq_idx": torch.arange(len(lengths)).repeat_interleave(lengths)[None].to(device, torch.int32),
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def hidden(self, decoder: Decoder, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states (T, d) of one row; transformers hands the documents' borders on under its own
        names.
        """
        ids, places = input_ids[None], positions.unsqueeze(-2)
        output = decoder(input_ids=ids, position_ids=places, use_cache=False, layout=self, **self._borders)
        states: torch.Tensor = output.last_hidden_state[0]
        return states


class WholeRows(AttentionLayout):
    """Rows of one length, prefilled at once or by one token each, behind the model's own cache."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Compute causal attention of (B, H, T, D), (B, K, S, D) and (B, K, S, E): (B, T, H, E). T is S, or 1: the
        last.
        """
        del layer
        tokens, mask = query.shape[2], None
        if window is not None and tokens == 1:
            key, value = key[:, :, -window:], value[:, :, -window:]
        elif window is not None and window < tokens and query.device.type != "cpu":
            return windowed_attention(query, key, value, scale, window).transpose(1, 2)
        elif window is not None and window < tokens:
            mask = banded(tokens, window, query.device)
        return causal_attention(query, key, value, scale, mask).transpose(1, 2)


@dataclass(eq=False)
class _Run:
    """Rows of one length that go through the model together, with the model's own ``cache`` of them."""

    cache: Any
    size: int


class RowsCache:
    """Generated rows over the model's own caches: the ``RowCache`` of models that can't use ``KVCache``.

    Rows of one length run together, so that nothing is ever padded. ``options`` go to each forward of the decoder.
    ``recompute``: the tokens themselves are what is kept, and run again for each new one.
    """

    def __init__(
        self, device: torch.device, options: Mapping[str, Any] | None = None, *, recompute: bool = False
    ) -> None:
        self.device, self.options, self.recompute = device, dict(options or {}), recompute
        self.lengths = torch.zeros(0, dtype=torch.int64)  # (count,) tokens in each row
        self._runs: list[_Run] = []
        self._run = torch.zeros(0, dtype=torch.int64)  # (count,) which run a row is in, and where in it
        self._place = torch.zeros(0, dtype=torch.int64)

    @property
    def count(self) -> int:
        """The number of rows in use."""
        return len(self.lengths)

    def append(self, lengths: torch.Tensor, copies: int) -> RowsPrefill:
        """Return the layout that runs each prompt once and copies its cache for each of its rows."""
        ends = lengths.cumsum(0)
        index = [torch.arange(start, end) for start, end in zip(ends - lengths, ends, strict=True)]
        positions = torch.cat([torch.arange(int(length)) for length in lengths])
        return RowsPrefill(self, index, copies, positions, ends - 1)

    def resume(self, lengths: torch.Tensor, copies: torch.Tensor, begun: torch.Tensor) -> RowsPrefill:
        """Return the layout that runs each begun row whole, its prompt included."""
        starts, own = lengths.cumsum(0) - lengths, lengths.sum() + begun.cumsum(0) - begun
        prompt = torch.arange(len(lengths)).repeat_interleave(copies)
        first, given = starts[prompt], lengths[prompt]
        index = [
            torch.cat([torch.arange(f, f + g), torch.arange(o, o + b)])
            for f, g, o, b in zip(first, given, own, begun, strict=True)
        ]
        stretches = [*((0, int(length)) for length in lengths), *zip(given.tolist(), begun.tolist(), strict=True)]
        positions = torch.cat([torch.arange(behind, behind + length) for behind, length in stretches])
        return RowsPrefill(self, index, 1, positions, torch.stack([row[-1] for row in index]))

    def extend(self) -> RowsDecode:
        """Return the layout of one more token in every row."""
        positions = self.lengths.clone()
        self.lengths += 1
        return RowsDecode(self, positions)

    def move(self, source: torch.Tensor, target: torch.Tensor, count: int) -> None:
        """Move the rows ``source`` to the places ``target``, so that ``count`` stay; a run gives up the rows that have
        left it.
        """
        for array in (self.lengths, self._run, self._place):
            array[target] = array[source]
        self.lengths, self._run, self._place = (array[:count] for array in (self.lengths, self._run, self._place))
        for number, run in enumerate(self._runs):
            rows = (self._run == number).nonzero()[:, 0]
            if len(rows) < run.size:
                places, order = self._place[rows].sort()
                self._place[rows[order]] = torch.arange(len(rows))
                run.cache = _chosen(run.cache, places.to(self.device), run.size) if len(rows) else None
                run.size = len(rows)
        self._forget_empty()

    def join(self, cache: Any, rows: torch.Tensor, copies: int) -> None:
        """Take a new run: ``rows`` (M,) of these caches, each ``copies`` times, stand where they are numbered."""
        if copies > 1:
            size = len(rows) // copies
            cache = _chosen(cache, torch.arange(size, device=self.device).repeat_interleave(copies), size)
        self._run[rows] = len(self._runs)
        self._place[rows] = torch.arange(len(rows))
        self._runs.append(_Run(cache, len(rows)))

    def take(self, lengths: torch.Tensor) -> torch.Tensor:
        """Take new rows of ``lengths`` (M,) behind those in use, to be joined with their caches; their numbers (M,)."""
        first = self.count
        self.lengths = torch.cat([self.lengths, lengths])
        self._run, self._place = (torch.cat([a, torch.zeros_like(lengths)]) for a in (self._run, self._place))
        return torch.arange(first, self.count)

    def runs(self) -> Iterator[tuple[_Run, torch.Tensor]]:
        """Yield each run with the numbers of its rows, in their order there."""
        for number, run in enumerate(self._runs):
            rows = (self._run == number).nonzero()[:, 0]
            yield run, rows[self._place[rows].argsort()]

    def _forget_empty(self) -> None:
        kept = [number for number, run in enumerate(self._runs) if run.size]
        renamed = torch.zeros(len(self._runs), dtype=torch.int64)
        renamed[kept] = torch.arange(len(kept))
        self._run = renamed[self._run]
        self._runs = [self._runs[number] for number in kept]


class RowsPrefill:
    """Stretches of a packed row that begin rows of ``cache``, each with ``copies``; rows of one length run together.

    ``index``: the packed places of each row's tokens. ``last`` (P,): the place of each row's last token.
    """

    def __init__(
        self, cache: RowsCache, index: list[torch.Tensor], copies: int, positions: torch.Tensor, last: torch.Tensor
    ) -> None:
        self._cache, self._index, self._copies = cache, index, copies
        self.positions, self.last = positions, last
        self._rows = cache.take(torch.tensor([len(row) for row in index]).repeat_interleave(copies))

    def hidden(self, decoder: Decoder, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states (T, d); prompts of equal length run together, and their caches are kept."""
        cache = self._cache
        found: torch.Tensor | None = None
        lengths = torch.tensor([len(row) for row in self._index])
        rows = self._rows.view(len(lengths), self._copies)
        for length in lengths.unique():
            chosen = (lengths == length).nonzero()[:, 0]
            index = torch.stack([self._index[i] for i in chosen.tolist()]).to(cache.device)
            states, own = _begun(decoder, input_ids[index], cache, _on_axes(positions, index))
            found = states.new_zeros(len(input_ids), states.shape[-1]) if found is None else found
            found[index.flatten()] = states.flatten(0, 1)
            cache.join(own, rows[chosen].flatten(), self._copies)
        assert found is not None  # there is a row at least
        return found


class RowsDecode:
    """One new token per row of ``cache``, run by run. ``positions`` (R,): where they stand."""

    def __init__(self, cache: RowsCache, positions: torch.Tensor) -> None:
        self._cache, self.positions = cache, positions

    def hidden(self, decoder: Decoder, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states (R, d) of one token per row, run by run."""
        cache = self._cache
        found: torch.Tensor | None = None
        for run, rows in cache.runs():
            chosen = rows.to(cache.device)
            ids, places = input_ids[chosen, None], positions[chosen, None]
            states = _again(decoder, ids, run) if cache.recompute else _further(decoder, ids, places, run, cache)
            found = states.new_zeros(len(input_ids), states.shape[-1]) if found is None else found
            found[chosen] = states
        assert found is not None  # there is a row at least
        return found


def _on_axes(positions: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a decoder must be told of the places ``index`` (B, T): nothing where it counts them as we do."""
    return {"position_ids": positions[:, index]} if positions.dim() == 2 else {}


def _begun(
    decoder: Decoder, ids: torch.Tensor, cache: RowsCache, places: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, Any]:
    """Return the hidden states (B, T, d) of rows ``ids`` (B, T), and what a run keeps of them."""
    output: Any = decoder(input_ids=ids, use_cache=not cache.recompute, **places, **cache.options)
    own = ids if cache.recompute else _cache_in(output)
    if own is None:  # some families fill one and keep it to themselves
        own = DynamicCache(config=decoder.config)
        output = decoder(input_ids=ids, use_cache=True, **{_taken(decoder): own}, **places, **cache.options)
    return output.last_hidden_state, own


def _further(decoder: Decoder, ids: torch.Tensor, positions: torch.Tensor, run: _Run, cache: RowsCache) -> torch.Tensor:
    """Return the hidden states (M, d) of one token more for each row of ``run``, ``ids`` and ``positions`` (M, 1)."""
    counted = "position_ids" in inspect.signature(decoder.forward).parameters
    places = {"position_ids": positions} if counted else {}
    output: Any = decoder(input_ids=ids, use_cache=True, **{_taken(decoder): run.cache}, **places, **cache.options)
    own = _cache_in(output)
    run.cache = run.cache if own is None else own
    states: torch.Tensor = output.last_hidden_state[:, 0]
    return states


def _again(decoder: Decoder, ids: torch.Tensor, run: _Run) -> torch.Tensor:
    """Return the hidden states as those of ``_further``, by all tokens of the rows."""
    run.cache = torch.cat([run.cache, ids], 1)
    output: Any = decoder(input_ids=run.cache, use_cache=False)
    states: torch.Tensor = output.last_hidden_state[:, -1]
    return states


def _taken(decoder: Decoder) -> str:
    """Return what the decoder calls the cache that it takes."""
    found = next((name for name in _CACHES if name in inspect.signature(decoder.forward).parameters), None)
    if found is None:
        raise TandemError(f"{type(decoder).__name__} takes no cache, so it can't generate")
    return found


def _cache_in(output: Any) -> Any:
    return next((output[name] for name in _CACHES if output.get(name) is not None), None)


def _chosen(held: Any, rows: torch.Tensor, size: int) -> Any:
    """Return the ``rows`` (M,) of whatever a family holds for ``size`` rows, repeated ones too.

    Caches have methods for it, which some families' own caches lack or get wrong.
    """
    if isinstance(held, torch.Tensor):
        return held.index_select(0, rows) if held.dim() and len(held) == size else held
    if isinstance(held, dict):
        return {name: _chosen(value, rows, size) for name, value in held.items()}
    if isinstance(held, list | tuple):
        return type(held)(_chosen(value, rows, size) for value in held)
    if hasattr(held, "__dict__") and not isinstance(held, PreTrainedConfig | nn.Module | type):
        for name, value in vars(held).items():
            setattr(held, name, _chosen(value, rows, size))
    return held
