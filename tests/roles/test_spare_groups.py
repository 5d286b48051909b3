"""Loops of several engines with spare groups: what ends on one engine fills a place that another had."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from tandem.dataflow.gate import Gate
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.spares import Spares
from tandem.dataflow.store import LocalStore
from tandem.dataflow.tickets import Request
from tandem.reward.outcome import Verdict
from tandem.roles.reward import RewardManager
from tandem.roles.rollout.filling import Filling, Rollout
from tandem.roles.rollout.spare_groups import SpareGroups
from tandem.rollout.protocol import GroupOutput, GroupRequest, Sampling
from tests.roles.fake_roles import LENGTH, FakeEngine, FakeScoring, FakeTokenizer, prompts

TICKETS, SPARE, N = 3, 2, 2


class CancellingEngine(FakeEngine):
    """Ends the last of what it holds first, and what is cancelled as if it had made one token of it."""

    def __init__(self) -> None:
        super().__init__(pick=lambda count: count - 1)
        self.cancelled: list[int | str] = []

    def cancel(self, keys: Iterable[int | str]) -> None:
        self.cancelled += keys

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        for output in super().generate(requests, sampling):
            yield self._ended(output) if output.request.key in self.cancelled else output

    def _ended(self, output: GroupOutput) -> GroupOutput:
        return replace(
            output,
            samples=tuple(
                replace(
                    sample,
                    token_ids=sample.token_ids[:1],
                    logprobs=sample.logprobs[:1],
                    versions=sample.versions[:1],
                    finish_reason="aborted",
                )
                for sample in output.samples
            ),
        )


def test_places_keep_their_order_and_the_rest_is_ended_and_told_of() -> None:
    engine, gate = CancellingEngine(), Gate(TICKETS + SPARE, 0)
    gate.join("rollout-0")
    ledger = Ledger(TICKETS, N, capacity=TICKETS, max_draws=5, settled_by=("responses", "rewards"))
    plane, source = LocalStore(ledger, lease_seconds=60.0), prompts(10)
    spares = SpareGroups(Spares(TICKETS, SPARE), gate)
    rollout = Rollout(
        "rollout-0",
        engine,
        source,
        RewardManager(FakeScoring(lambda group, i: Verdict(float(i))), on_error="mask"),
        plane,
        gate,
        Filling(Sampling(n=N, max_tokens=LENGTH), 0, False, "train", 60.0),
        FakeTokenizer(),
        spares=spares,
    )
    engine.load(None, 0)
    gate.acknowledge("rollout-0", 0)
    rollout.fill(0)
    names = ["responses", "uid"]
    lease = plane.take(Request("train", names, TICKETS, 0, "canonical"), timeout=0.0)
    assert lease is not None
    batch = plane.get(lease.tickets, names)
    # The last two of five are the spare ones, done first; then the place 2 is filled, and they fill 0 and 1.
    spare = [source.refill(0, place, 0).uid for place in (4, 3)]
    assert list(batch.non_tensor_batch["uid"])[::N] == [*spare, "p2"]
    assert batch.dense("group_ids").tolist() == [0, 0, 1, 1, 2, 2]
    assert engine.cancelled == [f"ticket {place} of partition 0 (attempt 0)" for place in (0, 1)]
    taken, asked = float(LENGTH), (3 * LENGTH + 2) / 5
    lengths = {"oversample/length_taken": taken, "oversample/length_asked": asked}
    expected = {"oversample/asked": 5.0, "oversample/cancelled": 2.0} | lengths
    assert spares.report(0) == pytest.approx(expected)
    plane.acknowledge(lease)
    plane.drop(0)
    plane.status().accounts.check()
    assert gate.engines()["rollout-0"].tickets == ()
    assert source.drawn == TICKETS  # the stream of the epochs is where it is without spare groups
