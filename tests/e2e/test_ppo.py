"""PPO: a critic values every state, is trained beside the actor, and the actor learns from it, in every mode."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from tests.e2e.seven import train

PPO = (
    "algorithm.adv_estimator={type: gae, gamma: 1.0, lam: 0.95}",
    "critic.enable=true",
    "critic.optim.lr=3.0e-3",
    "data.train_batch_size=8",
)
MODES = {
    "colocate": "{mode: colocate}",
    "hybrid": "{mode: hybrid, max_staleness: 1, num_iters_per_train_update: 4}",
    "fully async": "{mode: fully_async, max_staleness: 1, num_iters_per_train_update: 4}",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_learns(task: Path, tmp_path: Path, mode: str, seed: int) -> None:
    words = (f"execution={MODES[mode]}", f"trainer.seed={seed}", "trainer.total_steps=40")
    run = train(task, f"trainer.output_dir={tmp_path}", *PPO, *words)
    assert mean(run.rewards[-5:]) >= mean(run.rewards[:5]) + 0.3
    assert mean(run.column("value/explained_variance")[-10:]) >= 0.1
    assert run.rows[-1]["updates"] == run.session.composite.critic.updates == 40
