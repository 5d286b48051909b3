"""Short samples are not trained more often: a ticket belongs to its partition however late its group is finished."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction

import pytest
import torch

from tandem.columns.proto import DataProto
from tandem.dataflow.gate import Gate
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.partition import Order
from tandem.dataflow.store import LocalStore
from tandem.dataflow.tickets import Request, Ticket
from tandem.models.fingerprint import fingerprint
from tandem.roles.batch_metrics import sample_lags
from tandem.roles.reward import RewardManager
from tandem.roles.rollout.filling import Filling
from tandem.roles.rollout.worker import RolloutWorker
from tandem.rollout.protocol import GroupOutput, GroupRequest, SampleOutput, Sampling
from tests.modes.gates import ticket_of
from tests.roles.fake_roles import FakeScoring, FakeTokenizer, by_sample, prompts

STEPS, TICKETS, SAMPLES, SLICES, STALENESS = 40, 8, 2, 4, 2
COLUMNS = ["responses", "rewards", "reward_valid", "token_versions", "group_ids"]


class DecodingEngine:
    """Makes a token of every sample in flight at a time, so that a group takes as long as its longest sample.

    Lengths are drawn by seed: one in four is ten times the others. ``made`` are the lengths by ticket.
    """

    def __init__(self, at_once: int) -> None:
        self.version = 0
        self.made: dict[Ticket, list[int]] = {}
        self._at_once = at_once

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        source, flight, more = iter(requests), dict[str, tuple[GroupRequest, int]](), True
        while more or flight:
            while more and len(flight) < self._at_once:
                try:
                    request = next(source)
                except StopIteration:
                    more = False
                    break
                if request is None:
                    break
                flight[str(request.key)] = request, max(map(length_of, request.seeds))
            flight = {key: (request, left - 1) for key, (request, left) in flight.items()}
            for key in [key for key, (_, left) in flight.items() if left <= 0]:
                yield self._answer(flight.pop(key)[0])

    def _answer(self, request: GroupRequest) -> GroupOutput:
        lengths = [length_of(seed) for seed in request.seeds]
        self.made[ticket_of(request)] = lengths
        return GroupOutput(request, tuple(self._sample(length) for length in lengths))

    def _sample(self, length: int) -> SampleOutput:
        versions = torch.full((length,), self.version, dtype=torch.int32)
        return SampleOutput(torch.ones(length, dtype=torch.int64), torch.zeros(length), versions, "stop")

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> str | None:
        self.version = version
        return None if weights is None else fingerprint(weights)

    def pause(self, abort: bool = False) -> None: ...

    def resume(self) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


def length_of(seed: int) -> int:
    return 50 + seed % 7 if seed % 4 == 0 else 5 + seed % 3


@pytest.mark.parametrize("order", ["arrival", "canonical"])
def test_the_mean_length_trained_is_the_mean_length_generated(order: Order) -> None:
    gate = Gate(TICKETS, STALENESS, last=STEPS)
    settled, capacity = ("responses", "rewards"), TICKETS * (STALENESS + 1)
    ledger = Ledger(TICKETS, SAMPLES, capacity=capacity, max_draws=1, settled_by=settled)
    plane, source = LocalStore(ledger, lease_seconds=60.0), prompts(11)
    rewards = RewardManager(FakeScoring(by_sample))
    filling = Filling(Sampling(n=SAMPLES, max_tokens=100), 0, False, "train", 60.0)
    engines = {f"rollout-{i}": DecodingEngine(at_once) for i, at_once in enumerate((6, 8, 16))}
    streams = []
    for name, engine in engines.items():
        gate.join(name)
        gate.acknowledge(name, 0)
        streams.append(RolloutWorker(name, engine, source, rewards, plane, gate, filling, FakeTokenizer()))
    for stream in streams:
        stream.start()

    trained: dict[Ticket, list[int]] = {}
    by_slice: list[list[int]] = [[] for _ in range(SLICES)]
    for k in range(STEPS):
        for i in range(SLICES):
            lease = plane.take(Request("train", COLUMNS, TICKETS // SLICES, k, order, consumer="actor"), timeout=30.0)
            assert lease is not None
            batch = plane.get(lease.tickets, COLUMNS)
            assert int(sample_lags(batch, k).max()) <= STALENESS
            note(batch, k, trained)
            by_slice[i] += batch.ragged("responses").lengths.tolist()
            plane.acknowledge(lease)
        plane.seal(k, timeout=0.0)
        plane.drop(k)
        for name, engine in engines.items():
            engine.load(None, k + 1)
            gate.acknowledge(name, k + 1)
    for stream in streams:
        stream.stop()
        stream.join(30.0)
        stream.check()

    generated = {ticket: lengths for engine in engines.values() for ticket, lengths in engine.made.items()}
    assert trained == generated
    assert mean(trained) == mean(generated) > 10
    plane.status().accounts.check()
    means = [sum(lengths) / len(lengths) for lengths in by_slice]
    if order == "arrival":  # the bias is there to be had: what comes first is short
        assert means[0] < 0.7 * means[-1]
    else:  # slices that are optimizer steps: fixed by ticket, so none of them has the short ones
        places = {i: range(i * TICKETS // SLICES, (i + 1) * TICKETS // SLICES) for i in range(SLICES)}
        for i, lengths in enumerate(by_slice):
            assert lengths == [n for k in range(STEPS) for place in places[i] for n in generated[Ticket(k, place)]]


def note(batch: DataProto, partition: int, trained: dict[Ticket, list[int]]) -> None:
    lengths = batch.ragged("responses").lengths.tolist()
    for place, length in zip(batch.dense("group_ids").tolist(), lengths, strict=True):
        trained.setdefault(Ticket(partition, place), []).append(length)


def mean(groups: dict[Ticket, list[int]]) -> Fraction:
    lengths = [length for group in groups.values() for length in group]
    return Fraction(sum(lengths), len(lengths))
