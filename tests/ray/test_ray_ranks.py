"""Train ranks in actors: the ranks of a group meet, train as one, and are missed within seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tandem.base.errors import ConfigError, DeadlineError, DiedError
from tandem.roles.train_group import RankError, TrainGroup
from tandem.topology.ray_cluster import inventory, release, reserve
from tandem.topology.ray_devices import Share
from tandem.topology.ray_ranks import RankSetup, RayRank, gather_weights, start_ranks
from tandem.train.engine import FsdpEngine
from tandem.train.objective import PolicyObjective
from tests.train.conftest import build_batch, build_engine

pytestmark = pytest.mark.timeout(120)
OBJECTIVE = PolicyObjective(aggregation="seq-mean-token-mean")


def build(mesh: DeviceMesh | None) -> FsdpEngine:
    return build_engine(mesh=mesh, max_tokens=40)


@contextmanager
def two_ranks() -> Iterator[list[RayRank]]:
    slots = reserve([Share("actor", ("actor",), 1, 2)])
    try:
        yield start_ranks(slots["actor"], RankSetup(build, "cpu", seed=0, threads=1, meeting_s=30))
    finally:
        release(slots)


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_two_ranks_train_as_one_and_a_dead_one_is_missed_within_seconds(cluster: None) -> None:
    free = inventory().free
    batch = build_batch([7, 2, 30, 4, 9, 1], group_size=3)
    alone = TrainGroup.in_process(build(None), deadline_s=60)
    with two_ranks() as ranks:
        assert inventory().free == free - 2
        assert len({os.getpid(), *(rank.pid for rank in ranks)}) == 3
        group = TrainGroup(ranks, deadline_s=60)
        assert [status.pid for status in group.status()] == [rank.pid for rank in ranks]
        for _ in range(2):
            expected, found = (g.forward(batch, ["logprobs"])["logprobs"].values for g in (alone, group))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            losses = [float(g.forward_backward(batch, OBJECTIVE).loss) for g in (alone, group)]
            assert losses[1] == pytest.approx(losses[0], rel=1e-4)
            assert [g.optim_step(OBJECTIVE.denominator(batch)).applied for g in (alone, group)] == [True, True]
        shared = gather_weights(group, bucket_bytes=4096)
        assert len(shared.refs) > 3
        for (name, mine), (other, theirs) in zip(alone.export(), shared, strict=True):
            assert name == other
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        os.kill(ranks[1].pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises((DiedError, RankError), match="rank 1 of the actor"):
            group.forward_backward(batch, OBJECTIVE)
        assert time.monotonic() - started < 10
    until(lambda: inventory().free == free)


def test_too_few_devices_are_an_error_within_seconds(cluster: None) -> None:
    there, started = inventory(), time.monotonic()
    wanted = [Share("actor", ("actor",), 1, there.total), Share("rollout", ("rollout",), 1, 1)]
    with pytest.raises(ConfigError, match=rf"has {there.total} CPU slots .*: 1 missing"):
        reserve(wanted)
    assert time.monotonic() - started < 5


def test_devices_that_others_hold_are_not_waited_for_without_end(cluster: None) -> None:
    there = inventory()
    held = reserve([Share("actor", ("actor",), 1, there.total - 1)])
    started = time.monotonic()
    try:
        with pytest.raises(DeadlineError, match=rf"rollout 1 x 2; .* {there.total - 1} of them taken by others"):
            reserve([Share("rollout", ("rollout",), 1, 2)], timeout=1)
    finally:
        release(held)
    assert time.monotonic() - started < 10
    until(lambda: inventory().free == there.free)
