"""A broadcast from two train ranks to two engines and the two ranks of actor_fwd, in six processes, over gloo."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tandem.base.errors import DiedError, EngineDiedError
from tandem.models.loading import load_causal_lm
from tandem.plan.parts.placement import Placement
from tandem.remote.calls import import_ray
from tandem.roles.probing import TOLERANCES, LogprobProbe, ask
from tandem.roles.sending import SendingRanks
from tandem.roles.serving import ForwardModel
from tandem.roles.train_group import RankError, TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.rollout.hf import HfEngine
from tandem.rollout.spec import EngineSpec
from tandem.runtime.ray.engine import RayEngine
from tandem.runtime.ray.processes import RayRuntime
from tandem.runtime.ray.ranks import RankSetup, RayRank, RayTrainRank
from tandem.runtime.ray.roles import GroupScorer
from tandem.weights.broadcast import Broadcast, BroadcastSnapshots
from tandem.weights.probe import Answer
from tandem.weights.sync import Weights, WeightSync
from tests.ray.test_ray_runtime import OBJECTIVE, SAMPLING, build, tokens
from tests.rollout.tiny_models import llama, requests
from tests.train.conftest import build_batch

PLACED = (
    Placement("actor", "actor", 1, 2),
    Placement("rollout", "rollout", 1, 2),
    Placement("actor_fwd", "actor_fwd", 1, 2),
)
PROMPTS = [torch.tensor([3, 5, 7]), torch.tensor([2, 9, 4, 11, 6])]
VOCABULARY = llama(0).config.vocab_size
BATCH = build_batch([5, 9, 3, 7], group_size=2)


class Receiving:
    """An engine as a receiver that is asked what it generates with."""

    def __init__(self, engine: RayEngine) -> None:
        self.engine = engine

    def members(self, version: int) -> list[RayEngine]:
        return [self.engine]

    def load(self, weights: Weights, version: int) -> str | None:
        return self.engine.load(weights, version)

    def answer(self, prompts: list[torch.Tensor]) -> list[Answer]:
        return ask(self.engine, prompts, logprobs=True)


class Run:
    """Two ranks that train, and what follows them."""

    def __init__(self, runtime: RayRuntime, model: Path) -> None:
        spec = EngineSpec(
            model=str(model),
            engine="test_faulty",
            plugins=("tests.rollout.process_engines",),
            max_num_seqs=4,
            threads=1,
        )
        self.runtime = runtime
        self.engines = {e.name: e for e in runtime.engines("rollout", spec, deadline_s=60.0, bucket_bytes=4096)}
        setup = RankSetup(partial(build, model), "cpu", seed=0, threads=1, meeting_s=60)
        self.ranks: list[RayRank] = runtime.ranks("actor", setup)
        self.group = TrainGroup(self.ranks, deadline_s=60)
        scoring: TrainGroup[RayTrainRank] = TrainGroup(
            runtime.ranks("actor_fwd", setup), deadline_s=60, role="actor_fwd"
        )
        self.scorer = GroupScorer(scoring, 4096, None)
        self.forward = ForwardModel("actor_fwd", self.scorer, version=0)
        senders = SendingRanks(self.group, 20_000, 60.0)
        host = str(import_ray().util.get_node_ip_address())
        self.broadcast = Broadcast(senders, host=host, backend="gloo", deadline_s=60.0, piece_bytes=3000)
        self.acknowledged: list[tuple[str, int]] = []
        self.sync = WeightSync(
            BroadcastSnapshots(senders, self.broadcast),
            {**{name: Receiving(engine) for name, engine in self.engines.items()}, "actor_fwd": self.forward},
            require_actor=partial(self.group.call, TrainRank.require_actor),
            acknowledged=lambda name, version: self.acknowledged.append((name, version)),
            probe=LogprobProbe(self.group, PROMPTS, tokens=VOCABULARY, every=1, tolerance=TOLERANCES["float32"]),
            deadline_s=60,
        )

    def train(self) -> None:
        self.group.forward_backward(BATCH, OBJECTIVE)
        assert self.group.call(TrainRank.optim_step, OBJECTIVE.denominator(BATCH)).applied

    def answers(self, name: str) -> dict[int | str, list[list[int]]]:
        return tokens(list(self.engines[name].generate(requests(4), SAMPLING)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    llama(0).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def run(cluster: None, model: Path) -> Iterator[Run]:
    runtime = RayRuntime.start(PLACED)
    yield Run(runtime, model)
    runtime.close()


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def done() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=done, daemon=True)
    thread.start()
    return thread, errors


def test_engines_and_actor_fwd_have_what_two_ranks_trained(run: Run, model: Path) -> None:
    """And neither rank keeps more than its part of it: half, but for a bucket."""
    for version in (1, 2):
        run.train()
        run.sync.push(version)
    assert sorted(run.acknowledged) == sorted((n, v) for n in (*run.engines, "actor_fwd") for v in (1, 2))
    parts = [nbytes for _, nbytes in SendingRanks(run.group, 20_000, 60.0).parts(2)]
    largest = max(tensor.nbytes for _, tensor in run.group.export())
    assert sum(parts) == run.sync.nbytes and max(parts) - min(parts) < 20_000 + largest
    trained = HfEngine(load_causal_lm(model), max_num_seqs=4)
    trained.load(run.group.export(), 2)
    answers = tokens(list(trained.generate(requests(4), SAMPLING)))
    assert run.answers("rollout-0") == run.answers("rollout-1") == answers
    run.forward.adopt(2, 2, 30.0)
    scored, expected = (of.forward(BATCH, ["logprobs"])["logprobs"].values for of in (run.scorer, run.group))
    torch.testing.assert_close(scored, expected)
    assert dict(run.forward.held()).keys() == dict(run.group.export()).keys()
    assert run.broadcast._keys == 1


def test_an_engine_killed_midway_is_left_out_and_gets_the_version_once_it_is_there_again(run: Run) -> None:
    run.train()
    os.kill(run.engines["rollout-1"].pid, signal.SIGSTOP)  # so that nobody can have all of it yet
    thread, errors = in_thread(lambda: run.sync.push(3))
    time.sleep(1.0)
    assert thread.is_alive() and run.engines["rollout-0"].version == 2
    os.kill(run.engines["rollout-1"].pid, signal.SIGKILL)
    thread.join(60)
    assert isinstance(errors[0], EngineDiedError) and "rollout-1" in str(errors[0])
    run.sync.leave("rollout-1")
    run.sync.wait()
    assert run.engines["rollout-0"].ping(20) == 3
    run.train()  # beyond what is joined with
    run.engines["rollout-1"] = run.runtime.restart("rollout-1")
    run.sync.join("rollout-1", Receiving(run.engines["rollout-1"]))
    assert run.engines["rollout-1"].ping(20) == 3
    assert run.answers("rollout-1") == run.answers("rollout-0")
    run.sync.push(4)
    assert {engine.ping(20) for engine in run.engines.values()} == {4}


def test_a_rank_killed_midway_leaves_the_old_version_serving(run: Run) -> None:
    """The last test of this file: it costs a rank."""
    before = {name: run.answers(name) for name in run.engines}
    run.train()
    stopped = run.engines["rollout-0"]
    os.kill(stopped.pid, signal.SIGSTOP)
    thread, errors = in_thread(lambda: run.sync.push(5))
    time.sleep(1.0)
    assert thread.is_alive()
    os.kill(run.ranks[1].pid, signal.SIGKILL)
    os.kill(stopped.pid, signal.SIGCONT)
    thread.join(90)
    assert isinstance(errors[0], DiedError | RankError) and not thread.is_alive()
    assert "rank 1 of the actor" in str(errors[0])
    assert {engine.ping(20) for engine in run.engines.values()} == {4}
    assert {name: run.answers(name) for name in run.engines} == before
