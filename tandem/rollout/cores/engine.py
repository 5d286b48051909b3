"""Engines of other packages behind the protocol: their scheduler and kernels, stepped by this process between the turns
of whoever pauses them or changes their weights."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from tandem.base.errors import ContractError
from tandem.models.fingerprint import fingerprint
from tandem.rollout.cores.core import Core, CoreSettings, Drawn, Wanted
from tandem.rollout.cores.expected_weights import ExpectedWeights
from tandem.rollout.protocol import FinishReason, GroupOutput, GroupRequest, KeepKV, SampleOutput, Sampling
from tandem.rollout.stepping import SteppedEngine


class CoreEngine(SteppedEngine):
    """A ``RolloutEngine`` over a ``core``.

    The samples of a group are requests of their own, each with its seed, which share the keys and values of their
    prompt. Those are kept for later requests until the next ``load``. ``expected``: the weights that a load must bring,
    where that is known. ``whole``, ``patience`` and the others: see ``SteppedEngine``.
    """

    def __init__(
        self,
        core: Core,
        expected: ExpectedWeights | None,
        *,
        version: int,
        whole: bool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        keep_kv: KeepKV,
        patience: float = 600.0,
    ) -> None:
        super().__init__(
            version=version,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            keep_kv=keep_kv,
            context=core.context,
            patience=patience,
            whole=whole,
        )
        self._core, self._expected = core, expected
        self._names = itertools.count()
        self._rows: dict[str, _Row] = {}

    @classmethod
    def start(
        cls, core: Callable[[CoreSettings], Core], settings: CoreSettings, *, version: int, keep_kv: KeepKV
    ) -> CoreEngine:
        """Build the engine on the ``core`` of these settings. One that is to be ``filled`` generates nothing before
        its first load.
        """
        return cls(
            core(settings),
            ExpectedWeights.of(settings.path, settings.trust_remote_code),
            version=version,
            whole=not settings.filled,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            keep_kv=keep_kv,
        )

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> str | None:
        """Have the core take the weights over between two steps. After one that fails half-way it refuses to generate.

        The fingerprint is of what came: what the core made of it, a probe of the sender's shows.
        """
        if weights is None:
            raise ContractError("this engine has parameters of its own: call load(weights, version)")
        with self._loading(version):
            came = dict(weights)
            if self._expected is not None:
                self._expected.check(came)
            if not self._awake:
                self._core.wake("weights")
            self._core.take_over(list(came.items()), version)
        return fingerprint(came.items())

    def sleep(self) -> None:
        if self._awake:
            super().sleep()
            self._core.sleep()

    def wake(self) -> None:
        if not self._awake:
            self._core.wake("weights")
            self._core.wake("kv_cache")
            super().wake()

    def _open(self, sampling: Sampling) -> RunningRequests:
        if (objection := self._core.objection(sampling)) is not None:
            raise ContractError(f"sampling {objection}")
        return RunningRequests(self, sampling, self._max_num_seqs)

    # --- requests of all generations, at a token boundary ------------------------------------------------------------

    def begin(self, row: _Row, wanted: Wanted) -> None:
        """Put a sample in flight: the core continues what it has so far."""
        name = row.name = f"sample-{next(self._names)}"
        self._core.add(name, row.tokens_so_far(), wanted)
        self._rows[name] = row

    def step(self, version: int) -> None:
        """Draw a token more for every sample in flight, of whichever generation."""
        for drawn in self._core.step():
            row = self._rows[drawn.key]
            row.grow(drawn, version)
            if drawn.reason is not None:
                del self._rows[drawn.key]

    def forget(self, rows: Iterable[_Row]) -> None:
        """Take these samples out of flight, at once, whoever is drawing tokens."""
        with self._boundary.change():
            going = [row.name for row in rows if self._rows.pop(row.name, None) is not None]
            if going:
                self._core.abort(going)


@dataclass(eq=False)
class _Group:
    """A group in flight: its samples, finished or not, in the order of the seeds."""

    request: GroupRequest
    finished: deque[_Group]
    rows: list[_Row] = field(default_factory=list)
    going: int = 0

    def output(self) -> GroupOutput:
        """Return what the samples have so far, finished or not."""
        return GroupOutput(self.request, tuple(row.output() for row in self.rows))


@dataclass(eq=False)
class _Row:
    """A sample: what it has, and why it has ended; ``aborted`` while it hasn't."""

    group: _Group
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    reason: FinishReason = "aborted"
    name: str = ""

    @classmethod
    def of(cls, group: _Group, begun: SampleOutput | None) -> _Row:
        """Make a row that goes on from what has ``begun``, if anything."""
        if begun is None:
            return cls(group, [], [], [])
        tokens, logprobs, versions = (x.tolist() for x in (begun.token_ids, begun.logprobs, begun.versions))
        return cls(group, tokens, logprobs, versions, begun.finish_reason)

    def tokens_so_far(self) -> list[int]:
        """Join the prompt with what was drawn."""
        prompt: list[int] = self.group.request.prompt_ids.tolist()
        return prompt + self.tokens

    def grow(self, drawn: Drawn, version: int) -> None:
        """Append what a step drew under weights ``version``; a group whose last sample ends here is finished."""
        self.tokens += drawn.tokens
        self.logprobs += drawn.logprobs
        self.versions += [version] * len(drawn.tokens)
        if (watch := self.group.request.watch) is not None:
            watch(self.group.rows.index(self), drawn.tokens, drawn.logprobs)
        if drawn.reason is not None:
            self.reason = drawn.reason
            self.group.going -= 1
            if self.group.going == 0:
                self.group.finished.append(self.group)

    def output(self) -> SampleOutput:
        """Return the answer so far: no prompt, and ``aborted`` while nothing has ended it."""
        return SampleOutput(
            torch.tensor(self.tokens, dtype=torch.int64),
            torch.tensor(self.logprobs, dtype=torch.float32),
            torch.tensor(self.versions, dtype=torch.int32),
            self.reason,
        )


class RunningRequests:
    """The groups of one ``generate``; see ``RunningGroups``. Several share an engine's steps, whoever makes them."""

    def __init__(self, engine: CoreEngine, sampling: Sampling, limit: int) -> None:
        self._engine, self._sampling, self._limit = engine, sampling, limit
        self._groups: dict[_Group, None] = {}
        self._finished: deque[_Group] = deque()

    @property
    def count(self) -> int:
        """The number of samples in flight."""
        return sum(group.going for group in self._groups)

    @property
    def room(self) -> int:
        """The number of groups that can start now."""
        return (self._limit - self.count) // self._sampling.samples

    @property
    def ended(self) -> bool:
        """Whether a group has ended since the last ``take_finished``."""
        return bool(self._finished)

    def fits(self, requests: Sequence[GroupRequest]) -> bool:
        """Say that there is memory: the core has requests wait until there is."""
        del requests
        return True

    def admit(self, requests: list[GroupRequest], version: int) -> None:
        """Give the core the samples of these prompts, with what they have begun."""
        for request in requests:
            group = _Group(request, self._finished)
            begun: tuple[SampleOutput | None, ...] = request.begun or (None,) * len(request.seeds)
            group.rows = [_Row.of(group, sample) for sample in begun]
            unfinished = [i for i, row in enumerate(group.rows) if row.reason == "aborted"]
            group.going = len(unfinished)
            self._groups[group] = None
            for i in unfinished:
                self._engine.begin(group.rows[i], self._wanted(request, group.rows[i], i))
            if not unfinished:
                self._finished.append(group)

    def step(self, version: int) -> None:
        """Make a step of the core; none where a step of another's has ended a group of this one."""
        if not self._finished:
            self._engine.step(version)

    def abort(self, keys: Collection[int | str] | None = None) -> list[GroupOutput]:
        """Have the core forget what is in flight, or the groups with these ``keys``; return it as it is, with what had
        ended before.
        """
        going = [group for group in self._groups if keys is None or group.request.key in keys]
        self._engine.forget(row for group in going for row in group.rows)
        ended = self.take_finished()
        going = [group for group in going if group in self._groups]  # the others have ended meanwhile
        for group in going:
            del self._groups[group]
        return ended + [group.output() for group in going]

    def take_finished(self) -> list[GroupOutput]:
        """Return the groups that have ended since the last call."""
        ended = []
        while self._finished:
            group = self._finished.popleft()
            del self._groups[group]
            ended.append(group.output())
        return ended

    def close(self) -> None:
        """Have the core forget what is in flight, for nobody wants it."""
        if self._groups:
            self._engine.forget(row for group in self._groups for row in group.rows)

    def _wanted(self, request: GroupRequest, row: _Row, index: int) -> Wanted:
        """Say how the rest of a sample is to be drawn, under which seed and how far."""
        sampling = self._sampling
        return Wanted(
            greedy=sampling.greedy or (sampling.baseline and index == sampling.n),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=stream(request.seeds[index], len(row.tokens)),
            max_tokens=request.limit(sampling) - len(row.tokens),
            stop_token_ids=sampling.stop_token_ids,
        )


def stream(seed: int, drawn: int) -> int:
    """Derive the core's seed for a sample that has ``drawn`` tokens: what comes next is independent of what came
    first.
    """
    if drawn == 0:
        return seed % 2**63
    return int.from_bytes(hashlib.blake2b(f"{seed} {drawn}".encode(), digest_size=8).digest(), "little") % 2**63
