"""Rows that decode in lockstep: prompts join, every row grows by one token a step, finished rows leave at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from tandem.base.errors import TandemError
from tandem.columns.images import Images
from tandem.models.causal_lm import CausalLM
from tandem.models.head.projection import Head
from tandem.models.kv_cost import Rows
from tandem.models.layouts.attention import Layout
from tandem.models.layouts.kv_store import closing
from tandem.models.layouts.row_cache import Prefill, RowCache
from tandem.models.prefill import Prompts
from tandem.models.recording import recorder
from tandem.models.routers import NO_ROUTE, filled
from tandem.rollout.protocol import FinishReason, GroupOutput, GroupRequest, SampleOutput, Sampling
from tandem.rollout.sampler import draw, uniforms

Drawn = tuple[torch.Tensor, torch.Tensor]
"""Tokens (R,) and their log-probs (R,)."""

_LOGITS = 2**24  # elements of logits that exist at once


@dataclass(eq=False)
class _Group:
    """A group in flight: its finished samples by index in the group."""

    request: GroupRequest
    samples: dict[int, SampleOutput] = field(default_factory=dict)
    prompt_routes: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Resumed:
    """A prefill of begun answers: ``ids`` (T,) at ``positions`` (T,) or (3, T), and ``shifts`` (R,) of its rows."""

    layout: Prefill
    ids: torch.Tensor
    positions: torch.Tensor
    shifts: torch.Tensor
    images: Images | None


def asked(request: GroupRequest, sampling: Sampling, rows: int | None = None) -> Rows:
    """Return the rows of a prompt at the longest that they can become: all of them, or so many."""
    count = sampling.samples if rows is None else rows
    return Rows(count, len(request.prompt_ids), request.limit(sampling), shared=sampling.samples > 1)


class Block:
    """At most ``limit`` rows over one cache, all drawn by one ``sampling``. Row r of every array here is row r there.

    Arrays that change hands with a row live on the CPU; the model's device sees the tokens, positions and the cache.
    """

    def __init__(self, model: CausalLM, sampling: Sampling, cache: RowCache, limit: int) -> None:
        self._model, self._sampling, self._cache = model, sampling, cache
        self._device = cache.device
        self._stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64)
        self._seeds = torch.zeros(limit, dtype=torch.int64)
        self._drawn = torch.zeros(limit, dtype=torch.int64)
        self._limits = torch.zeros(limit, dtype=torch.int64)  # tokens at which a row ends
        self._last = torch.zeros(limit, dtype=torch.int64)
        self._shifts = torch.zeros(limit, dtype=torch.int64)  # from a token's place in its row to its position
        self._tokens = torch.empty(limit, sampling.max_tokens, dtype=torch.int64)
        self._logprobs = torch.empty(limit, sampling.max_tokens, dtype=torch.float32)
        self._versions = torch.empty(limit, sampling.max_tokens, dtype=torch.int32)
        self._routes = torch.empty(limit, sampling.max_tokens, sampling.routes, dtype=torch.uint8)
        self._owners: list[tuple[_Group, int]] = []
        self.finished: list[GroupOutput] = []  # whoever takes them clears the list
        self._limit = limit
        self._watched = False  # somebody wants to know what is drawn
        self._recorder = recorder(model, sampling.routes)

    @property
    def _tables(self) -> tuple[torch.Tensor, ...]:
        """What is kept of each token of a row, (limit, max_tokens, ...) each."""
        return self._tokens, self._logprobs, self._versions, self._routes

    @property
    def count(self) -> int:
        """The number of rows in flight."""
        return self._cache.count

    @property
    def room(self) -> int:
        """Groups that can join now."""
        return (self._limit - self.count) // self._sampling.samples

    def flying(self) -> list[Rows]:
        """Return the rows in flight of each prompt, at the longest that they can become."""
        rows = Counter(group for group, _ in self._owners)
        return [asked(group.request, self._sampling, count) for group, count in rows.items()]

    def admit(self, requests: Sequence[GroupRequest], version: int) -> None:
        """Prefill these prompts and draw the next token of each of their samples."""
        self._watched = self._watched or any(request.watch is not None for request in requests)
        fresh = [request for request in requests if not request.begun]
        if fresh:
            self._start(fresh, version)
        owners = self._unfinished([request for request in requests if request.begun])
        if owners:
            self._resume(owners, version)

    def _start(self, requests: Sequence[GroupRequest], version: int) -> None:
        """Prefill each prompt once, all in one packed row, and draw the first token of each of its samples."""
        first, copies = self.count, self._sampling.samples
        prompts = self._seen(requests)
        layout = self._cache.append(torch.tensor([len(r.prompt_ids) for r in requests]), copies)
        groups = [_Group(request) for request in requests]
        self._owners += [(group, i) for group in groups for i in range(copies)]
        rows = slice(first, self.count)
        self._seeds[rows] = torch.tensor([seed for r in requests for seed in r.seeds])
        self._drawn[rows] = 0
        self._limits[rows] = torch.tensor([r.limit(self._sampling) for r in requests for _ in r.seeds])
        self._shifts[rows] = prompts.shift.repeat_interleave(copies)
        ids, positions = prompts.rows.values, prompts.placed(layout.positions)
        ends = layout.last.to(self._device)

        def read(hidden: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
            return self._draw(hidden[ends], head, rows)

        drawn, routes = self._run(ids, positions, layout, read, prompts.images)
        if routes is not None:
            for group, found in zip(groups, routes.split([len(r.prompt_ids) for r in requests]), strict=True):
                group.prompt_routes = found
        self._record(rows, version, *drawn)

    def _seen(self, requests: Sequence[GroupRequest]) -> Prompts:
        return Prompts.of(self._model, [r.prompt_ids for r in requests], [r.images for r in requests])

    def _unfinished(self, requests: Sequence[GroupRequest]) -> list[tuple[_Group, int]]:
        """Take over the finished samples of begun groups, and return those that go on, each by group and index."""
        owners = []
        for request in requests:
            done = {i: s for i, s in enumerate(request.begun) if s.finish_reason != "aborted"}
            group = _Group(request, done)
            owners += [(group, i) for i in range(len(request.begun)) if i not in done]
            self._close(group)
        return owners

    def _resume(self, owners: list[tuple[_Group, int]], version: int) -> None:
        """Prefill prompts and what their samples have begun, under the weights as they are, and draw the next token."""
        first = self.count
        begun = [group.request.begun[i] for group, i in owners]
        drawn = torch.tensor([len(sample.token_ids) for sample in begun])
        prefill = self._prefill(owners, begun, drawn)
        layout = prefill.layout
        self._owners += owners
        rows = slice(first, self.count)
        self._seeds[rows] = torch.tensor([group.request.seeds[i] for group, i in owners])
        self._drawn[rows] = drawn
        self._limits[rows] = torch.tensor([group.request.limit(self._sampling) for group, _ in owners])
        self._shifts[rows] = prefill.shifts
        for row, sample in enumerate(begun, start=first):
            length = len(sample.token_ids)
            self._tokens[row, :length] = sample.token_ids
            self._logprobs[row, :length] = sample.logprobs
            self._versions[row, :length] = sample.versions
        ends = layout.last.to(self._device)

        def read(hidden: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
            return self._draw(hidden[ends], head, rows)

        tokens, routes = self._run(prefill.ids, prefill.positions, layout, read, prefill.images)
        if routes is not None:
            self._keep_routes(owners, begun, routes)
        self._record(rows, version, *tokens)

    def _keep_routes(self, owners: list[tuple[_Group, int]], begun: list[SampleOutput], routes: torch.Tensor) -> None:
        """Keep the routes (T, w) of a prefill of ``begun``: those of prompts, and of tokens that have none yet."""
        groups = list(dict.fromkeys(group for group, _ in owners))
        prompts, answers = [len(group.request.prompt_ids) for group in groups], [len(s.token_ids) for s in begun]
        if self._sampling.samples == 1:  # as ``_prefill`` lays them out
            parts = routes.split([length for pair in zip(prompts, answers, strict=True) for length in pair])
            given, drawn = parts[::2], parts[1::2]
        else:
            parts = routes.split([*prompts, *answers])
            given, drawn = parts[: len(groups)], parts[len(groups) :]
        for group, found in zip(groups, given, strict=True):
            group.prompt_routes = found
        for row, sample, found in zip(range(self.count - len(begun), self.count), begun, drawn, strict=True):
            self._routes[row, : len(found)] = found if sample.routes is None else filled(sample.routes, found)

    def _prefill(self, owners: list[tuple[_Group, int]], begun: list[SampleOutput], drawn: torch.Tensor) -> _Resumed:
        """Return what is run of prompts and of the ``drawn`` (R,) int64 tokens that ``begun`` have."""
        answers = [sample.token_ids for sample in begun]
        if self._sampling.samples == 1:  # a prompt that nobody shares stands in the row of its answer
            prompts = self._seen([group.request for group, _ in owners])
            layout = self._cache.append(prompts.rows.lengths + drawn, 1)
            return _Resumed(layout, *prompts.joined(answers, layout.positions), prompts.shift, prompts.images)
        copies = Counter(group for group, _ in owners)
        prompts = self._seen([group.request for group in copies])
        counts = torch.tensor(list(copies.values()))
        layout = self._cache.resume(prompts.rows.lengths, counts, drawn)
        owner = torch.repeat_interleave(counts)
        positions = prompts.before(layout.positions, owner.repeat_interleave(drawn))
        ids = torch.cat([prompts.rows.values, *answers])
        return _Resumed(layout, ids, positions, prompts.shift[owner], prompts.images)

    def abort(self, keys: Collection[int | str] | None = None) -> None:
        """End every row as it is, or those of the groups with these ``keys``."""
        owners = self._owners[: self.count]
        ended = [row for row, (group, _) in enumerate(owners) if keys is None or group.request.key in keys]
        rows = torch.tensor(ended, dtype=torch.int64)
        if len(rows):
            self._finish(rows, ["aborted"] * len(rows))
            self._drop(rows)

    def forget(self) -> None:
        """Drop every row, which nobody wants."""
        self._drop(torch.arange(self.count))

    def step(self, version: int) -> None:
        """Draw one more token for every row in flight, with weights ``version``."""
        rows = slice(0, self.count)
        layout = self._cache.extend()

        def read(hidden: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
            return self._draw(hidden, head, rows)

        drawn, routes = self._run(self._last[rows], layout.positions + self._shifts[rows], layout, read)
        if routes is not None:
            self._routes[torch.arange(self.count), self._drawn[rows] - 1] = routes
        self._record(rows, version, *drawn)

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        layout: Layout,
        read: Callable[[torch.Tensor, Head], Drawn],
        images: Images | None = None,
    ) -> tuple[Drawn, torch.Tensor | None]:
        """Run tokens (T,) and return what was drawn, and their routes (T, w) where they are recorded."""
        ids, positions, recorder = ids.to(self._device), positions.to(self._device), self._recorder
        drawn = self._model(ids, positions, layout, read, images, watched=recorder is not None)
        return drawn, None if recorder is None else recorder.take_routes().cpu()

    def _draw(self, hidden: torch.Tensor, head: Head, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw for the ``rows`` from ``hidden`` (G, d), each of whose states serves equally many neighbouring rows."""
        uniform = uniforms(self._seeds[rows], self._drawn[rows]).to(hidden.device)
        greedy = self._greedy(rows)
        copies = len(uniform) // len(hidden)
        states = max(1, _LOGITS // head.size)
        parts = []
        for start in range(0, len(hidden), states):
            logits = head.logits(hidden[start : start + states])
            owner = torch.arange(len(logits), device=hidden.device).repeat_interleave(copies)
            served = slice(start * copies, start * copies + len(owner))
            chosen = None if greedy is None else greedy[served]
            parts.append(draw(logits, self._sampling, uniform[served], owner, chosen))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])

    def _greedy(self, rows: slice) -> torch.Tensor | None:
        """Return which of the ``rows`` (R,) are their group's greedy sample; None where groups have none."""
        if not self._sampling.baseline:
            return None
        return torch.tensor([i == self._sampling.n for _, i in self._owners[rows]], device=self._device)

    def _record(self, rows: slice, version: int, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        if tokens.device.type != "cpu":  # one copy, in which ids and log-probs are exact
            drawn = torch.stack([tokens.double(), logprobs.double()]).cpu()
            tokens, logprobs = drawn[0].long(), drawn[1].float()
        broken = logprobs.isnan()
        if bool(broken.any()):
            group, _ = self._owners[rows.start + int(broken.nonzero()[0])]
            raise TandemError(
                f"prompt {group.request.key!r}: the model at weights version {version} gives logits that are not "
                "finite: its weights are broken, or overflow in this dtype"
            )
        at = (torch.arange(rows.start, rows.stop), self._drawn[rows])
        self._tokens[at], self._logprobs[at], self._versions[at] = tokens, logprobs, version
        self._routes[at] = NO_ROUTE  # until the next token is drawn
        self._last[rows] = tokens
        self._drawn[rows] += 1
        if self._watched:
            self._notify(rows, tokens, logprobs)
        stopped = torch.isin(tokens, self._stops)
        ended = stopped | (self._drawn[rows] == self._limits[rows])
        if bool(ended.any()):
            chosen = ended.nonzero()[:, 0]
            self._finish(chosen + rows.start, ["stop" if stop else "length" for stop in stopped[chosen].tolist()])
            self._drop(chosen + rows.start)

    def _notify(self, rows: slice, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Tell whoever watches the new tokens (R,) of its rows."""
        for (group, index), token, logprob in zip(self._owners[rows], tokens.tolist(), logprobs.tolist(), strict=True):
            if group.request.watch is not None:
                group.request.watch(index, [token], [logprob])

    def _finish(self, rows: torch.Tensor, reasons: Sequence[FinishReason]) -> None:
        """Hand the ended ``rows`` (E,) to their groups."""
        lengths = self._drawn[rows].tolist()
        width = max(lengths)
        columns = zip(*(table[rows, :width] for table in self._tables), strict=True)
        for row, length, reason, found in zip(rows.tolist(), lengths, reasons, columns, strict=True):
            group, index = self._owners[row]
            tokens, logprobs, versions, routes = (values[:length] for values in found)
            kept = routes if self._recorder is not None else None
            group.samples[index] = SampleOutput(tokens, logprobs, versions, reason, kept)
            self._close(group)

    def _close(self, group: _Group) -> None:
        """Give the group out if all its samples have ended."""
        if len(group.samples) == self._sampling.samples:
            samples = tuple(group.samples[i] for i in range(self._sampling.samples))
            self.finished.append(GroupOutput(group.request, samples, group.prompt_routes))

    def _drop(self, rows: torch.Tensor) -> None:
        """Close the gaps that the ended ``rows`` (E,) leave by the last rows that go on."""
        kept = torch.ones(self.count, dtype=torch.bool)
        kept[rows] = False
        count = self.count - len(rows)
        source, target = closing(kept)
        self._cache.move(source, target, count)
        width = int(self._drawn[source].max()) if len(source) else 0
        for array in (self._seeds, self._drawn, self._limits, self._last, self._shifts):
            array[target] = array[source]
        for table in self._tables:
            table[target, :width] = table[source, :width]
        for to, origin in zip(target.tolist(), source.tolist(), strict=True):
            self._owners[to] = self._owners[origin]
        del self._owners[count:]
