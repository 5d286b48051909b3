"""Two train ranks and two engines in four processes: generation, weights, deaths."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tandem.base.errors import ContractError, DiedError, EngineDiedError
from tandem.config.model import OptimConfig
from tandem.models.loading import load_causal_lm
from tandem.plan.parts.placement import Placement
from tandem.remote.calls import import_ray
from tandem.roles.train_group import RankError, TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import GroupOutput, GroupRequest, Sampling
from tandem.rollout.spec import EngineSpec
from tandem.runtime.ray.engine import RayEngine
from tandem.runtime.ray.processes import RayRuntime, RemoteSnapshots, shares
from tandem.runtime.ray.ranks import RankSetup, RayRank
from tandem.train.engine import FsdpEngine
from tandem.train.objective import PolicyObjective
from tandem.weights.sync import WeightSync
from tests.rollout.process_engines import order
from tests.rollout.tiny_models import llama, requests
from tests.train.conftest import build_batch

SAMPLING = Sampling(n=2, max_tokens=8, stop_token_ids=(0, 1))
OBJECTIVE = PolicyObjective(aggregation="seq-mean-token-mean")
CPU = torch.device("cpu")
PLACED = (Placement("actor", "actor", 1, 2), Placement("rollout", "rollout", 1, 2))


def build(model: Path, device: torch.device, mesh: DeviceMesh | None) -> FsdpEngine:
    return FsdpEngine(
        load_causal_lm(model),
        optim=OptimConfig(lr=0.1),
        total_updates=10,
        max_tokens_per_micro_batch=100,
        temperature=1.0,
        mesh=mesh,
        device=device,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    llama(0).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def runtime(cluster: None) -> Iterator[RayRuntime]:
    runtime = RayRuntime.start(PLACED)
    yield runtime
    runtime.close()


@pytest.fixture(scope="module")
def engines(runtime: RayRuntime, model: Path) -> list[RayEngine]:
    spec = EngineSpec(
        model=str(model), engine="test_faulty", plugins=("tests.rollout.process_engines",), max_num_seqs=4, threads=1
    )
    return runtime.engines("rollout", spec, deadline_s=30.0, bucket_bytes=4096)


@pytest.fixture(scope="module")
def ranks(runtime: RayRuntime, model: Path, engines: list[RayEngine]) -> list[RayRank]:
    return runtime.ranks("actor", RankSetup(partial(build, model), "cpu", seed=0, threads=1, meeting_s=30))


def tokens(outputs: list[GroupOutput]) -> dict[int | str, list[list[int]]]:
    return {o.request.key: [sample.token_ids.tolist() for sample in o.samples] for o in outputs}


def test_every_rank_and_every_engine_is_a_process_of_its_own(engines: list[RayEngine], ranks: list[RayRank]) -> None:
    assert len({os.getpid(), *(engine.pid for engine in engines), *(rank.pid for rank in ranks)}) == 5


def test_actors_and_their_devices_are_named_by_role_and_rank(engines: list[RayEngine], ranks: list[RayRank]) -> None:
    del engines, ranks  # they are there
    ray = import_ray()
    actors = {name.partition(" (")[0] for name in ray.util.list_named_actors()}
    groups = {group["name"].partition(" (")[0] for group in ray.util.placement_group_table().values()}
    assert actors >= {f"rank {i} of the actor" for i in (0, 1)} | {f"rollout engine 'rollout-{i}'" for i in (0, 1)}
    assert groups >= {"actor, node 0", "rollout, node 0"}


def test_an_actor_generates_what_an_engine_here_does(engines: list[RayEngine], model: Path) -> None:
    here = HfEngine(load_causal_lm(model), max_num_seqs=4)
    asked = [request for request in requests(12) if int(request.prompt_ids[0]) < 30]  # the others are orders
    expected = tokens(list(here.generate(asked, SAMPLING)))
    pulled = 0

    def source() -> Iterator[GroupRequest]:
        nonlocal pulled
        for request in asked:
            pulled += 1
            yield request

    found = []
    for finished, output in enumerate(engines[0].generate(source(), SAMPLING), start=1):
        assert pulled <= finished + 3 * 2  # two groups in flight, a window of two that wait, and one under way
        found.append(output)
    assert tokens(found) == expected
    assert all((sample.versions == 0).all() for output in found for sample in output.samples)


def test_an_engines_refusal_comes_through(engines: list[RayEngine], model: Path) -> None:
    with pytest.raises(ContractError, match="order 33 is refused"):
        list(engines[0].generate([order(33)], SAMPLING))
    with pytest.raises(ContractError, match=r"call load\(weights, version\)"):
        engines[0].load(None, 1)
    with pytest.raises(ContractError, match="weights did not come"):
        engines[0].load([("model.norm.weight", torch.ones(llama(0).config.hidden_size))], 1)
    engines[0].load(load_causal_lm(model).model.state_dict().items(), 0)  # after half a load it needs a whole one


def test_two_ranks_train_as_one(ranks: list[RayRank], model: Path) -> None:
    group, alone = TrainGroup(ranks, deadline_s=60), TrainGroup.in_process(build(model, CPU, None), deadline_s=60)
    assert [status.pid for status in group.every(TrainRank.status)] == [rank.pid for rank in ranks]
    batch = build_batch([7, 2, 30, 4, 9, 1], group_size=3)
    for _ in range(2):
        expected, found = (g.forward(batch, ["logprobs"])["logprobs"].values for g in (alone, group))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        losses = [float(g.forward_backward(batch, OBJECTIVE).loss) for g in (alone, group)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        assert [g.call(TrainRank.optim_step, OBJECTIVE.denominator(batch)).applied for g in (alone, group)] == [
            True,
            True,
        ]
        group.check()


def test_weights_of_two_ranks_reach_two_engines(engines: list[RayEngine], ranks: list[RayRank], model: Path) -> None:
    group = TrainGroup(ranks, deadline_s=60)
    acknowledged: list[tuple[str, int]] = []
    sync = WeightSync(
        RemoteSnapshots(group, bucket_bytes=4096),
        {engine.name: engine for engine in engines},
        require_actor=partial(group.call, TrainRank.require_actor),
        acknowledged=lambda name, version: acknowledged.append((name, version)),
        deadline_s=60,
    )
    batch = build_batch([5, 9, 3, 7], group_size=2)
    for version in (1, 2):
        group.forward_backward(batch, OBJECTIVE)
        assert group.call(TrainRank.optim_step, OBJECTIVE.denominator(batch)).applied
        sync.push(version)
        assert {engine.ping(20) for engine in engines} == {version}
    assert sorted(acknowledged) == [(f"rollout-{i}", v) for i in range(2) for v in (1, 2)]
    trained = HfEngine(load_causal_lm(model), max_num_seqs=4)
    trained.load(group.export(), 2)
    expected = tokens(list(trained.generate(requests(4), SAMPLING)))
    for engine in engines:
        outputs = list(engine.generate(requests(4), SAMPLING))
        assert tokens(outputs) == expected
        assert all((sample.versions == 2).all() for output in outputs for sample in output.samples)


def test_b83_a_killed_engine_is_missed_at_once_and_the_other_goes_on(engines: list[RayEngine]) -> None:
    """Among the last tests of this file: it costs an engine."""
    errors: list[BaseException] = []

    def generate() -> None:
        try:
            list(engines[1].generate([order(32)], SAMPLING))  # hangs, until it is killed
        except EngineDiedError as error:
            errors.append(error)

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    time.sleep(0.3)  # most likely it generates by now; the outcome is the same if it doesn't
    started = time.monotonic()
    os.kill(engines[1].pid, signal.SIGKILL)
    thread.join(20)
    assert time.monotonic() - started < 10
    assert "rollout engine 'rollout-1'" in str(errors[0]) and "died" in str(errors[0])
    with pytest.raises(EngineDiedError, match="rollout-1"):
        engines[1].ping(20)
    assert len(list(engines[0].generate(requests(2), SAMPLING))) == 2


def test_a_rank_that_is_stopped_is_named_while_the_others_wait_for_it(
    ranks: list[RayRank], caplog: pytest.LogCaptureFixture
) -> None:
    """And only then: one that works for as long gives signs of life."""
    group = TrainGroup(ranks, deadline_s=60, warning_s=4.0)
    batch = build_batch([5, 9], group_size=1)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    waking = threading.Timer(12.0, os.kill, (ranks[1].pid, signal.SIGCONT))
    waking.start()
    group.forward_backward(batch, OBJECTIVE)
    told = [line for line in caplog.messages if "forward_backward stalled for" in line]
    assert told and all("rank 1 of the actor" in line and "rank 0 of the actor" not in line for line in told)
    waking.join()
    assert group.silent() == []
    group.call(TrainRank.optim_step, 1.0)


def test_b83_a_killed_rank_ends_the_call_of_all_within_seconds(ranks: list[RayRank]) -> None:
    """Among the last tests of this file: it costs a rank."""
    group, started = TrainGroup(ranks, deadline_s=60), time.monotonic()
    os.kill(ranks[1].pid, signal.SIGKILL)
    with pytest.raises((DiedError, RankError), match="rank 1 of the actor"):
        group.forward_backward(build_batch([5, 9], group_size=1), OBJECTIVE)
    assert time.monotonic() - started < 10


def test_b83_a_dead_rank_is_missed_by_whoever_only_looks(ranks: list[RayRank]) -> None:
    """Among the last tests of this file: it costs a rank."""
    group = TrainGroup(ranks[:1], deadline_s=60)
    group.check()
    os.kill(ranks[0].pid, signal.SIGKILL)
    with pytest.raises(DiedError, match="rank 0 of the actor"):
        for _ in range(200):
            group.check()
            time.sleep(0.05)


def test_roles_that_take_turns_share_devices() -> None:
    shared = (Placement("actor", "shared", 1, 2), Placement("rollout", "shared", 2, 2), Placement("ref", "own", 1, 1))
    assert [str(share) for share in shares(shared)] == ["actor+rollout 2 x 2", "ref 1 x 1"]
