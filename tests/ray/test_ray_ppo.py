"""PPO on Ray: the critic on two ranks of its own, the same run as in one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tandem.control.entry import LOOPS
from tandem.roles.train_group import TrainGroup
from tandem.runtime.ray.ranks import RayRank
from tests.e2e.conftest import task
from tests.e2e.seven import Run, distance, prepare, train

__all__ = ["task"]

PPO = (
    "algorithm.adv_estimator=gae",
    "critic.enable=true",
    "critic.optim.lr=3.0e-3",
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.exact=true",
    "trainer.total_steps=2",
    "trainer.save_interval=1",
)
RESOURCE = "{actor: [1, 1], critic: [1, 2], rollout: [1, 1]}"


def exported(run: Run) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights of actor and critic."""
    critic = run.session.composite.critic
    assert critic is not None
    return run.weights, {name: tensor.clone() for name, tensor in critic.export()}


def pids(group: TrainGroup) -> set[int]:
    return {rank.pid for rank in group._ranks if isinstance(rank, RayRank)}


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_a_critic_of_two_ranks_makes_the_run_of_one_process_which_can_go_on_from_it(task: Path, tmp_path: Path) -> None:
    here = exported(train(task, f"trainer.output_dir={tmp_path / 'here'}", *PPO))
    execution = f"{{mode: hybrid, max_staleness: 0, resource: {RESOURCE}}}"
    words = (task, *PPO, f"execution={execution}", "runtime={name: ray, torch_threads: 1}")
    session = prepare(*words, f"trainer.output_dir={tmp_path / 'ray'}")
    run, critic = Run(session, session.run.output_dir), session.composite.critic
    assert critic is not None
    with session.run.running():
        processes = [pids(session.composite.actor.ranks), pids(critic.ranks), {os.getpid()}]
        assert len(set().union(*processes)) == 1 + 2 + 1
        LOOPS[session.plan.loop](session)
        there = exported(run)
    assert (run.output / "critic" / "config.json").is_file()
    saved = run.output / "checkpoints" / "step_00000001"
    resumed = exported(train(task, f"trainer.output_dir={tmp_path / 'again'}", *PPO, f"trainer.resume={saved}"))
    for weights in (there, resumed):
        assert distance(weights[0], here[0]) < 1e-4
        assert distance(weights[1], here[1]) < 1e-4
