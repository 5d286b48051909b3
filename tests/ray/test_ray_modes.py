"""Training on Ray, real processes: the modes are the same run there as here, and a death is survived or told."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.base.errors import ConfigError, DiedError
from tandem.columns.proto import DataProto
from tandem.control.entry import LOOPS
from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import load_tokenizer
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.observe.status.channel import ask
from tandem.observe.status.status import Status
from tandem.roles.train_group import RankError
from tandem.runtime.ray.ranks import RayRank
from tandem.session.rollout import RestingWorkers, Workers
from tandem.session.session import Session
from tests.e2e.conftest import task
from tests.e2e.seven import Run, distance, equal, prepare

__all__ = ["task"]

FIVE = (
    "trainer.total_steps=5",
    "trainer.exact=true",
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "algorithm.kl={in: loss, coef: 0.05}",
    "algorithm.old_logprobs=recompute",
)
RAY = ("runtime.name=ray", "runtime.threads=false")
BROADCAST = "weight_sync: {transport: collective}"
ONE, TWO = "resource: {actor: [1, 1], rollout: [1, 1]}", "resource: {actor: [1, 2], rollout: [1, 2]}"


@dataclass
class Watched:
    """A finished run, the batches of its steps in canonical order, and its processes."""

    run: Run
    weights: dict[str, torch.Tensor]
    steps: list[DataProto]
    pids: list[int]
    status: Status
    """What the run said of itself while it ended its last step."""

    def samples(self) -> list[tuple[list[Any], ...]]:
        """By step: who was asked, what came, what it was worth."""
        return [
            (
                batch.non_tensor_batch["uid"],
                batch.dense("sample_index").tolist(),
                [row.tolist() for row in batch.ragged("responses")],
                batch.dense("rewards").tolist(),
                [row.tolist() for row in batch.ragged("advantages")],
            )
            for batch in self.steps
        ]


def watch(*words: str | Path) -> Watched:
    session = prepare(*words)
    steps: list[DataProto] = []
    statuses: list[Status] = []
    end_step = session.run.end_step

    def watched(step: int, batch: DataProto, update: dict[str, float]) -> None:
        order = sorted(
            range(len(batch)), key=lambda i: (int(batch.dense("group_ids")[i]), int(batch.dense("sample_index")[i]))
        )
        steps.append(batch[torch.tensor(order)])
        statuses.append(Status.of_json(ask(session.run.output_dir, "status")))
        end_step(step, batch, update)

    object.__setattr__(session.run, "end_step", watched)
    run = Run(session, session.run.output_dir)
    with session.run.running():
        pids = pids_of(session)
        LOOPS[session.plan.loop](session)
        weights = run.weights
    return Watched(run, weights, steps, pids, statuses[-1])


def pids_of(session: Session[Any]) -> list[int]:
    """Of the ranks and engines."""
    ranks = [handle.pid for handle in session.composite.actor.ranks._ranks if isinstance(handle, RayRank)]
    streams = session.rollout.alive if isinstance(session.rollout, Workers | RestingWorkers) else []
    return [*ranks, *(stream.engine.pid for stream in streams)]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def here(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """The synchronous run in one process."""
    return watch(task, f"trainer.output_dir={tmp_path_factory.mktemp('here')}", *FIVE)


SAME = {
    "colocate, one and two": ("{mode: colocate, resource: {actor: [1, 1], rollout: [1, 2]}}", 1, 3),
    "hybrid": (f"{{mode: hybrid, max_staleness: 0, {ONE}}}", 1, 2),
    "fully async, weights broadcast": (
        f"{{mode: fully_async, max_staleness: 0, num_iters_per_train_update: 4, {BROADCAST}, {ONE}}}",
        1,
        2,
    ),
    "hybrid in 4 sub-batches, two and two": (
        f"{{mode: hybrid, max_staleness: 0, num_iters_per_train_update: 4, balance_data: true, {TWO}}}",
        2,
        4,
    ),
}
"""Execution, ranks, and the processes of ranks and engines together."""


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if "sub-batches" in name else name for name in SAME]
)
def test_without_staleness_every_mode_is_the_synchronous_run(
    task: Path, here: Watched, tmp_path: Path, name: str
) -> None:
    execution, ranks, processes = SAME[name]
    found = watch(task, f"trainer.output_dir={tmp_path}", f"execution={execution}", *RAY, *FIVE)
    assert len({os.getpid(), *found.pids}) == processes + 1
    assert found.samples() == here.samples()
    if ranks == 1:
        assert equal(found.weights, here.weights)
    else:
        assert distance(found.weights, here.weights) < 1e-5
    assert [engine.version for engine in found.status.engines] == [4] * (processes - ranks)
    assert [(line.partition, line.filled) for line in found.status.partitions[:1]] == [(4, 8)]
    assert found.run.column("version") == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert found.run.session.run.progress.samples == here.run.session.run.progress.samples != ""


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_a_model_and_rows_on_two_devices_train_as_on_one(task: Path, tmp_path: Path) -> None:
    """A row more than there are tokens makes its vocabulary even."""
    shape = json.loads((task.parent / "model" / "config.json").read_text())
    model = new_model({**shape, "vocab_size": shape["vocab_size"] + 1}, seed=0)
    save_pretrained_atomic(model, load_tokenizer(str(task.parent / "model")), tmp_path / "model")
    words = (task, f"actor_rollout_ref.model.path={tmp_path / 'model'}", *FIVE)
    alone = watch(*words, f"trainer.output_dir={tmp_path / 'alone'}")
    execution = "execution={mode: hybrid, max_staleness: 0, resource: {actor: [1, 2], rollout: [1, 1]}}"
    for split in ("tensor_model_parallel_size", "ulysses_sequence_parallel_size"):
        shared = f"actor_rollout_ref.actor.{split}=2"
        found = watch(*words, f"trainer.output_dir={tmp_path / split}", execution, shared, *RAY)
        assert len({os.getpid(), *found.pids}) == 4
        assert found.samples() == alone.samples()
        assert distance(found.weights, alone.weights) < 1e-5


@pytest.mark.usefixtures("cluster")
def test_too_few_devices_are_told_before_anything_starts(task: Path, tmp_path: Path) -> None:
    execution = "{mode: hybrid, resource: {actor: [1, 90], rollout: [1, 10]}}"
    with pytest.raises(
        ConfigError, match=r"actor 1 x 90, rollout 1 x 10 need 100 CPU slots, the cluster has .* missing"
    ):
        prepare(task, f"trainer.output_dir={tmp_path}", f"execution={execution}", *RAY)


@pytest.mark.usefixtures("cluster")
def test_b83_a_killed_engine_is_replaced_a_killed_rank_ends_the_run_and_a_resumed_one_loses_nothing(
    task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks and two engines, staleness 2, a broadcast of weights, a reward of the user's own in a file."""
    reward = tmp_path / "mine.py"
    reward.write_text("def mine(response, ground_truth):\n    return float(response[:1] == ground_truth[:1])\n")
    words = (
        task,
        *RAY,
        f"trainer.output_dir={tmp_path / 'run'}",
        f"execution={{mode: hybrid, max_staleness: 2, num_iters_per_train_update: 2, {BROADCAST}, {TWO}}}",
        "execution.balance_data=true",
        f"reward_manager={{type: mine, file: {reward}}}",
        "algorithm.kl={in: loss, coef: 0.05}",
        "trainer.total_epochs=4",
        "trainer.total_steps=null",
        "trainer.save_interval=1",
        "trainer.keep_checkpoints=9",
        "trainer.rollouts_per_step=99",
        "data.train_batch_size=4",
    )
    session = prepare(*words)
    assert isinstance(session.rollout, Workers)
    before = pids_of(session)
    assert len({os.getpid(), *before}) == 5

    def end_step(step: int, batch: DataProto, update: dict[str, float]) -> None:
        type(session.run).end_step(session.run, step, batch, update)
        if step == 1:
            os.kill(before[3], signal.SIGKILL)
        if step == 4:
            os.kill(before[1], signal.SIGKILL)

    object.__setattr__(session.run, "end_step", end_step)
    with pytest.raises((DiedError, RankError), match="rank 1 of the actor"), session.run.running():
        LOOPS["hybrid"](session)
    assert "it is started again (1)" in caplog.text
    assert len(read_rows(session.run.output_dir / METRICS_FILE)) >= 4

    again = prepare(*words, "trainer.resume=auto")
    with again.run.running():
        LOOPS["hybrid"](again)
        accounts = again.plane.status().accounts
    resumed = Run(again, again.run.output_dir)
    assert [row["step"] for row in resumed.rows] == list(range(1, 11))
    assert max(resumed.column("lag/max")) <= 2
    assert min(resumed.column("balance/max_over_mean")) >= 1
    accounts.check()
    assert accounts.queued == 0
    seen = [prompt for step in resumed.prompts for prompt in step]
    assert sorted(seen) == sorted(f"{d}>" for d in range(10) for _ in range(4))
    assert {row["reward/mean"] for row in resumed.rows} <= {i / 32 for i in range(33)}
