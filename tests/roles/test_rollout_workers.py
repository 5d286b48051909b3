"""Several rollout loops as one role: who gets what, and what becomes of it when engines die."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.base.errors import EngineDiedError
from tandem.columns.proto import DataProto
from tandem.dataflow.gate import Gate
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.store import LocalStore
from tandem.dataflow.tickets import Request
from tandem.models.fingerprint import fingerprint
from tandem.reward.outcome import Verdict, failed
from tandem.roles.reward import RewardManager
from tandem.roles.rollout.causes import cause_of_stall
from tandem.roles.rollout.engine_pool import EnginePool
from tandem.roles.rollout.filling import FAILED, Filling
from tandem.roles.rollout.updated import UpdatedWorker
from tandem.roles.rollout.utilization import Utilization
from tandem.roles.rollout.worker import RolloutWorker
from tandem.roles.rollout.workers import RolloutWorkers
from tandem.rollout.process import HostedEngine
from tandem.rollout.protocol import GroupOutput, GroupRequest, RolloutEngine, Sampling
from tandem.weights.sync import Snapshot, WeightSync
from tests.roles.fake_roles import LENGTH, FakeEngine, FakeScoring, FakeTokenizer, prompts

N, TICKETS, STALENESS, STEPS = 2, 4, 1, 4
WEIGHTS = [("w", torch.zeros(1))]
SAMPLING = Sampling(n=N, max_tokens=LENGTH)


class DyingEngine(FakeEngine):
    """A ``FakeEngine`` that works as if in a process: it dies after ``lives`` groups, in the middle of the next."""

    def __init__(self, name: str, lives: float = float("inf")) -> None:
        super().__init__(at_once=3)
        self.name, self.lives, self.answered = name, lives, 0
        self.started = True
        self._version = -1
        self._dead = threading.Event()

    def kill(self) -> None:
        """As from outside."""
        self._dead.set()

    def is_ready(self) -> bool:
        self.check()
        return self.started

    def check(self) -> None:
        if self._dead.is_set():
            raise EngineDiedError(f"{self.name} was killed by SIGKILL")

    def ping(self, deadline_s: float) -> int:
        self.check()
        return self._version

    applied_s, steps = 0.0, 0

    def close(self) -> None:
        self.kill()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> str | None:
        self.check()
        return super().load(weights, version)

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        source, held, more = iter(requests), list[GroupRequest](), True
        while True:
            while more and len(held) < self._at_once:
                try:
                    request = next(source)
                except StopIteration:
                    more = False
                    break
                if request is None:
                    break
                held.append(request)
                self.asked.append(request)
            if self.answered >= self.lives:
                self.kill()
            self.check()
            if not held:
                return
            time.sleep(0.001)
            self.answered += 1
            yield self._answer(held.pop(0))


@dataclass
class Company:
    """Rollout workers over engines that ``make`` makes, with what they work with. ``made``: engines by name."""

    make: Callable[[str, int], DyingEngine]
    names: list[str]
    max_restarts: int = 1
    overlap: bool = False
    made: dict[str, list[DyingEngine]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        gate = Gate(TICKETS, STALENESS, last=STEPS, even=True)
        for name in self.names:
            gate.join(name)
        self.gate = gate
        capacity = TICKETS * (STALENESS + 1)
        ledger = Ledger(TICKETS, N, capacity=capacity, max_draws=3, settled_by=("responses", "rewards"))
        self.plane = LocalStore(ledger, lease_seconds=60.0)
        self.source = prompts(TICKETS * STEPS)
        self.scoring = FakeScoring(lambda group, i: Verdict(float(i)))
        self.rewards = RewardManager(self.scoring, on_error="mask")
        streams = [self.stream(name) for name in self.names]
        engines: dict[str, RolloutEngine] = {stream.name: stream.engine for stream in streams}
        publisher = WeightSync(
            lambda: Snapshot(WEIGHTS, lambda: fingerprint(WEIGHTS)),
            {stream.name: self.receiver(stream) for stream in streams},
            require_actor=lambda purpose: None,
            acknowledged=self.gate.acknowledge,
            overlap=self.overlap,
            deadline_s=20.0,
        )
        self.rollout_workers = RolloutWorkers(
            streams,
            EnginePool(engines),
            self.gate,
            publisher,
            restart=self.stream,
            receiver=self.receiver,
            max_restarts=self.max_restarts,
        )

    def stream(self, name: str) -> RolloutWorker:
        before = self.made.setdefault(name, [])
        engine = self.make(name, len(before))
        before.append(engine)
        filling = Filling(SAMPLING, 0, False, "train", 20.0, "rewards")
        return RolloutWorker(name, engine, self.source, self.rewards, self.plane, self.gate, filling, FakeTokenizer())

    def receiver(self, stream: RolloutWorker) -> UpdatedWorker:
        return UpdatedWorker(stream, self.gate, "keep", 20.0)

    def batch(self, partition: int) -> DataProto:
        """The sealed partition, once it is there."""
        names = ["responses", "rewards", "token_versions", "uid"]
        self.await_filled(partition)
        self.plane.seal(partition, timeout=0.0)
        lease = self.plane.take(Request("train", names, TICKETS, partition, "canonical"), timeout=0.0)
        assert lease is not None
        return self.plane.get(lease.tickets, names)

    def await_filled(self, partition: int) -> None:
        """Return once every group of the partition is there."""
        until = time.monotonic() + 20
        while True:
            self.rollout_workers.check()
            status = self.plane.status().partitions
            if partition in status and status[partition].filled == TICKETS:
                return
            assert time.monotonic() < until, status
            time.sleep(0.005)

    def train(self) -> list[DataProto]:
        """All partitions, as an actor would go through them."""
        batches = []
        try:
            self.rollout_workers.start()
            self.rollout_workers.publish(0)
            for k in range(STEPS):
                batch = self.batch(k)
                assert int(batch.ragged("token_versions").values.min()) >= k - STALENESS
                batches.append(batch)
                self.rollout_workers.report_step(k)
                self.plane.drop(k)
                self.rollout_workers.publish(k + 1)
        finally:
            self.rollout_workers.stop(10.0)
        accounts = self.plane.status().accounts
        accounts.check()
        assert accounts.trained == STEPS * TICKETS * N
        return batches


def told(batches: list[DataProto]) -> list[tuple[list[str], list[list[int]]]]:
    return [
        (list(batch.non_tensor_batch["uid"]), [row.tolist() for row in batch.ragged("responses")]) for batch in batches
    ]


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[str], list[list[int]]]]:
    """What one engine that doesn't die makes."""
    return told(Company(lambda name, life: DyingEngine(name), ["only"]).train())


def test_dropped_groups_are_told_of_their_own_partition() -> None:
    company = Company(lambda name, life: DyingEngine(name), ["a", "b"])
    company.rewards._on_error = "refill"
    judge = company.scoring.judge
    company.scoring.judge = lambda group, i: (
        failed("broken") if group.non_tensor_batch["uid"][0] == f"p{TICKETS}" else judge(group, i)
    )
    counts = []
    try:
        company.rollout_workers.start()
        company.rollout_workers.publish(0)
        company.await_filled(1)  # ahead of the partition that is told
        for k in range(2):
            company.batch(k)
            company.rollout_workers.report_step(k)
            counts.append(dict(company.rollout_workers.counts))
    finally:
        company.rollout_workers.stop(10.0)
    assert counts[0] == {} and counts[1][FAILED] >= 1


def test_samples_are_those_of_the_tickets_whoever_makes_them(expected: list[tuple[list[str], list[list[int]]]]) -> None:
    company = Company(lambda name, life: DyingEngine(name), ["a", "b", "c"])
    assert told(company.train()) == expected
    assert [uids[::N] for uids, _ in expected] == [
        [f"p{TICKETS * k + i}" for i in range(TICKETS)] for k in range(STEPS)
    ]
    shares = [engines[0].answered for engines in company.made.values()]
    assert sum(shares) == STEPS * TICKETS and min(shares) >= 2


@settings(max_examples=25)
@given(deaths=st.dictionaries(st.sampled_from("abc"), st.integers(0, 6), max_size=3), overlap=st.booleans())
def test_b83_whoever_dies_and_whenever_the_samples_stay_the_same(
    expected: list[tuple[list[str], list[list[int]]]], deaths: dict[str, int], overlap: bool
) -> None:
    """Each engine may die once; its groups are made by others, or by itself after it has come back."""

    def make(name: str, life: int) -> DyingEngine:
        return DyingEngine(name, deaths.get(name, float("inf")) if life == 0 else float("inf"))

    company = Company(make, ["a", "b", "c"], overlap=overlap)
    assert told(company.train()) == expected


def test_b83_a_lone_engine_comes_back_with_the_version_of_the_day_before_it_works(
    expected: list[tuple[list[str], list[list[int]]]],
) -> None:
    lives = 2 * TICKETS + 1  # the last of them is of partition 2, for which the gate has seen version 1
    company = Company(lambda name, life: DyingEngine(name, lives if life == 0 else float("inf")), ["only"])
    assert told(company.train()) == expected
    first, second = company.made["only"]
    assert first.answered == lives and second.answered == STEPS * TICKETS - lives
    assert second.calls[0] != "load 0" and second.calls[0].startswith("load")


def test_from_its_death_on_an_engine_is_not_at_work() -> None:
    now = [0.0]
    company = Company(lambda name, life: DyingEngine(name, 1), ["only"], max_restarts=0)
    (stream,) = company.rollout_workers.alive
    stream.utilization = Utilization(lambda: now[0])
    company.rollout_workers.start()
    company.rollout_workers.publish(0)
    with pytest.raises(EngineDiedError):
        company.batch(0)
    now[0] = 100.0
    assert [work.seconds for _, work in company.rollout_workers.take_work(0)] == [0.0]
    company.rollout_workers.stop(10.0)


@pytest.mark.parametrize(("restarts", "lives"), [(1, 2), (0, 1)])
def test_b83_one_death_too_many_ends_the_run_with_it(restarts: int, lives: int) -> None:
    company = Company(lambda name, life: DyingEngine(name, 3), ["only"], max_restarts=restarts)
    with pytest.raises(EngineDiedError, match="only was killed by SIGKILL"):
        company.train()
    assert len(company.made["only"]) == lives


class NeverUp(DyingEngine, HostedEngine):
    """An engine whose process ended before it took an order."""

    came_up = False

    def wait_until_ready(self) -> None:
        self.kill()
        self.check()


def test_an_engine_that_never_came_up_is_not_started_again() -> None:
    company = Company(lambda name, life: NeverUp(name, 0), ["only"])
    with pytest.raises(EngineDiedError, match="only was killed by SIGKILL"):
        company.train()
    assert len(company.made["only"]) == 1


def test_b83_a_death_is_noticed_while_nobody_asks_the_engine_for_anything() -> None:
    company = Company(lambda name, life: DyingEngine(name), ["a", "b"])
    company.rollout_workers.start()
    company.rollout_workers.publish(0)
    company.batch(0)
    company.batch(1)  # now the gate is closed: all wait for version 1
    company.made["a"][0].kill()
    until = time.monotonic() + 10
    while len(company.made["a"]) == 1:
        company.rollout_workers.check()
        assert time.monotonic() < until
        time.sleep(0.01)
    company.rollout_workers.gather(10.0)
    assert sorted(stream.name for stream in company.rollout_workers.alive) == ["a", "b"]
    company.rollout_workers.stop(10.0)


def test_an_engine_that_starts_again_gets_nothing_before_it_is_ready() -> None:
    company = Company(lambda name, life: DyingEngine(name, 2 if life == 0 else float("inf")), ["a"])

    def slow(name: str, life: int) -> DyingEngine:
        engine = DyingEngine(name)
        engine.started = False
        return engine

    company.rollout_workers.start()
    company.rollout_workers.publish(0)
    company.make = slow
    until = time.monotonic() + 10
    while len(company.made["a"]) == 1:
        company.rollout_workers.check()
        assert time.monotonic() < until
        time.sleep(0.01)
    company.rollout_workers.check()
    second = company.made["a"][1]
    assert second.calls == [] and company.rollout_workers.alive == []
    assert "has loaded no weights" in str(company.gate.closed("a"))
    cause = cause_of_stall(
        company.plane, company.gate, company.rollout_workers.members, 0, company.rollout_workers.starting
    )
    assert "given back, for engine 'a' died," in cause and "a has died and is starting again" in cause
    assert "on engine" not in cause
    assert company.rollout_workers.blockers() == "a has died and is starting again"
    second.started = True
    company.rollout_workers.gather(10.0)
    assert second.calls == ["load 0"]
    company.batch(0)
    company.rollout_workers.stop(10.0)


def test_a_fleet_deals_its_requests_and_asks_others_for_what_the_dead_owe() -> None:
    engines = {name: DyingEngine(name, lives) for name, lives in (("a", float("inf")), ("b", 1))}
    pool = EnginePool(dict(engines))
    asked = [GroupRequest(i, torch.tensor([i]), (2 * i, 2 * i + 1)) for i in range(8)]
    found = {int(output.request.key): output for output in pool.generate(iter(asked), SAMPLING)}
    assert sorted(found) == list(range(8))
    assert [int(found[i].samples[1].token_ids[0]) for i in range(8)] == [(2 * i + 1) % 10 for i in range(8)]
    assert engines["b"].answered == 1 and engines["a"].answered == 7
    with pytest.raises(EngineDiedError, match="b was killed"):
        list(EnginePool({"b": engines["b"]}).generate(asked, SAMPLING))
