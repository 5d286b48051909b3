"""Stand-ins for what a role drives: an engine without a model, scoring without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from tandem.base.deadline import Deadline
from tandem.columns.proto import DataProto
from tandem.data.prompts import Prompt
from tandem.data.sampler import Sampler
from tandem.dataflow.gate import Gate
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.store import LocalStore
from tandem.dataflow.tickets import Request
from tandem.models.fingerprint import fingerprint
from tandem.reward.outcome import Scores, Verdict
from tandem.reward.process.job import Handle
from tandem.roles.reward import RewardManager
from tandem.roles.rollout.filling import Filling, Rollout
from tandem.rollout.protocol import GroupOutput, GroupRequest, SampleOutput, Sampling

LENGTH = 3
"""Tokens of every answer."""

Judge = Callable[[DataProto, int], Verdict]
"""(group, its sample) -> verdict."""


class FakeEngine:
    """Answers sample i of a prompt with ``LENGTH`` times the last number of its seed; no weights, no model.

    At most ``at_once`` groups are open; when no more can be pulled the one that ``pick`` chooses of them ends.
    ``asked`` are the requests in the order in which they were pulled.
    """

    def __init__(
        self,
        *,
        at_once: int = 1000,
        pick: Callable[[int], int] = lambda count: 0,
        finish_reason: Literal["stop", "length"] = "stop",
        behind: int = 0,
    ) -> None:
        self.asked: list[GroupRequest] = []
        self.calls: list[str] = []
        self.finish_reason = finish_reason
        self._at_once = at_once
        self._pick = pick
        self._behind = behind
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        self.calls.append("generate")
        source, held = iter(requests), list[GroupRequest]()
        while True:
            while len(held) < self._at_once and (request := next(source, None)) is not None:
                assert len(request.seeds) == sampling.samples
                held.append(request)
                self.asked.append(request)
            if not held:
                return
            yield self._answer(held.pop(self._pick(len(held))))

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> str | None:
        self.calls.append(f"load {version}")
        self._version = version
        return None if weights is None else fingerprint(weights)

    def pause(self, abort: bool = False) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")

    def _answer(self, request: GroupRequest) -> GroupOutput:
        samples = tuple(
            SampleOutput(
                torch.full((LENGTH,), seed % 10),
                torch.full((LENGTH,), -1.0),
                torch.full((LENGTH,), self._version - self._behind, dtype=torch.int32),
                self.finish_reason,
            )
            for seed in request.seeds
        )
        return GroupOutput(request, samples)


@dataclass
class FakeScoring:
    """Scores at once, by ``judge``; ``labels`` are the groups as they came."""

    judge: Judge
    labels: list[str] = field(default_factory=list)
    closed: bool = False

    def await_ready(self) -> None:
        """It is."""

    def submit(self, group: DataProto, label: str = "group") -> Handle:
        self.labels.append(label)
        handle = Handle(label, len(group))
        handle.put(0, [self.judge(group, i) for i in range(len(group))])
        return handle

    def collect(self, handle: Handle, deadline: Deadline) -> Scores:
        return handle.scores()

    def check(self) -> None:
        """It can always score."""

    def activity(self) -> str:
        return "nothing"

    def close(self) -> None:
        self.closed = True


class FakeTokenizer:
    """Numbers as text."""

    eos_token_id = 0
    pad_token_id = 0

    def decode(self, ids: torch.Tensor | Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(int(token)) for token in ids)


def prompts(count: int) -> Sampler[Prompt]:
    """``count`` prompts, drawn in order without end."""
    items = [Prompt(f"p{i}", (100 + i,), f"question {i}", ground_truth=str(i)) for i in range(count)]
    return Sampler(items, seed=7, shuffle=False)


def by_sample(group: DataProto, i: int) -> Verdict:
    """A reward that differs inside a group."""
    return Verdict(float(i))


@dataclass
class Rig:
    """A rollout role over fakes, with the data plane and the gate it works with."""

    rollout: Rollout
    engine: FakeEngine
    scoring: FakeScoring
    plane: LocalStore
    gate: Gate
    tickets: int
    greedy: bool = False

    def publish(self, version: int) -> None:
        """Weights ``version`` are there."""
        self.engine.load(None, version)
        self.gate.acknowledge("rollout-0", version)

    def fill(self, partition: int) -> DataProto:
        """Fill a partition and read it back, in canonical order."""
        self.rollout.fill(partition)
        names = ["prompts", "responses", "rewards", "reward_valid", "token_versions", "truncated", "uid"]
        names += ["reward_baselines"] if self.greedy else []
        lease = self.plane.take(Request("train", names, self.tickets, partition, "canonical"), timeout=0.0)
        assert lease is not None
        batch = self.plane.get(lease.tickets, names)
        self.plane.acknowledge(lease)
        return batch

    def trained(self, partition: int) -> None:
        """The partition is over; samples are conserved."""
        self.plane.drop(partition)
        self.plane.status().accounts.check()


def rig(
    *,
    tickets: int = 4,
    n: int = 3,
    judge: Judge = by_sample,
    on_error: Literal["mask", "refill", "stop"] = "mask",
    filter_equal: bool = False,
    overlong: Literal["train", "mask"] = "train",
    max_draws: int = 5,
    engine: FakeEngine | None = None,
    source: Sampler[Prompt] | None = None,
    seed: int = 0,
    components: tuple[str, ...] = (),
    baseline: bool = False,
) -> Rig:
    """Everything that fills partitions, at version 0."""
    gate = Gate(tickets, 0)
    gate.join("rollout-0")
    ledger = Ledger(tickets, n, capacity=tickets, max_draws=max_draws, settled_by=("responses", "rewards"))
    plane, scoring = LocalStore(ledger, lease_seconds=60.0), FakeScoring(judge)
    signal: Literal["rewards", "reward_components"] = "reward_components" if components else "rewards"
    engine = FakeEngine() if engine is None else engine
    rollout = Rollout(
        "rollout-0",
        engine,
        prompts(10) if source is None else source,
        RewardManager(scoring, on_error=on_error, components=components),
        plane,
        gate,
        Filling(Sampling(n=n, max_tokens=LENGTH, baseline=baseline), seed, filter_equal, overlong, 60.0, signal),
        FakeTokenizer(),
    )
    made = Rig(rollout, engine, scoring, plane, gate, tickets, baseline)
    made.publish(0)
    return made
