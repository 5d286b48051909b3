"""PPO: a critic values every state, is trained beside the actor, and the actor learns from it, in every mode."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tandem.base.errors import ConfigError, TandemError
from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import character_tokenizer, load_tokenizer
from tandem.roles.critic import Critic
from tandem.session.session import Session
from tests.e2e.seven import ALPHABET, SHAPE, Run, equal, prepare, started, train

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
SYNCHRONOUS = {
    "hybrid": "{mode: hybrid, max_staleness: 0, num_iters_per_train_update: 4}",
    "hybrid, the critic on devices of its own": "{mode: hybrid, max_staleness: 0, resource: {critic: [1, 1]}}",
    "fully async": "{mode: fully_async, max_staleness: 0, num_iters_per_train_update: 4}",
}
SMALL = (
    *PPO,
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "critic.ppo_epochs=2",
    "critic.warmup_steps=1",
    "algorithm.kl={in: reward, coef: 0.05}",
    "trainer.total_steps=4",
    "trainer.exact=true",
    "trainer.rollouts_per_step=16",
)
TIMES = ("time/", "cpu/", "throughput/", "rollout/", "limit/", "push/", "system/")


def critic_of(run: Run | Session[Any]) -> Critic:
    critic = (run.session if isinstance(run, Run) else run).composite.critic
    assert critic is not None
    return critic


def critic_weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in critic_of(run).export()}


def lines(run: Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in run.rows]


@pytest.mark.parametrize(
    ("mode", "seed"),
    [
        pytest.param(mode, seed, marks=[pytest.mark.long] if seed else [])
        for mode, seed in [*((m, s) for m in ("colocate", "hybrid") for s in range(3)), ("fully async", 0)]
    ],
)
def test_ppo_learns(task: Path, tmp_path: Path, mode: str, seed: int) -> None:
    words = (f"execution={MODES[mode]}", f"trainer.seed={seed}", "trainer.total_steps=30")
    run = train(task, f"trainer.output_dir={tmp_path}", *PPO, *words)
    assert mean(run.rewards[-5:]) >= mean(run.rewards[:5]) + 0.2
    assert run.rows[-1]["updates"] == critic_of(run).updates == 30
    assert max(run.column("lag/max")) <= (0 if mode == "colocate" else 1)
    told = {"loss", "clipfrac", "explained_variance", "grad_norm", "lr", "mean", "returns", "applied", "skipped_steps"}
    assert {key.removeprefix("value/") for key in run.rows[-1] if key.startswith("value/")} == told


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Synchronous, with mini-batches, a KL in the reward, two passes of the critic, and a step of warm-up."""
    out = tmp_path_factory.mktemp("ppo")
    return train(task, f"trainer.output_dir={out}", *SMALL, "trainer.save_interval=1", "trainer.keep_checkpoints=9")


@pytest.mark.parametrize("mode", SYNCHRONOUS)
def test_without_staleness_every_mode_is_the_synchronous_run(task: Path, whole: Run, tmp_path: Path, mode: str) -> None:
    run = train(task, f"trainer.output_dir={tmp_path}", *SMALL, f"execution={SYNCHRONOUS[mode]}")
    assert run.prompts == whole.prompts
    for one, other in zip(lines(run), lines(whole), strict=True):  # a mean may have been summed in another order
        assert one == pytest.approx(other, rel=1e-6)
    assert equal(run.weights, whole.weights)
    assert equal(critic_weights(run), critic_weights(whole))


def test_the_actor_rests_while_the_critic_warms_up(whole: Run) -> None:
    assert [row["version"] for row in whole.rows] == [1, 2, 3, 4]
    assert [row["updates"] for row in whole.rows] == [0, 2, 4, 6]
    assert [row["value/applied"] for row in whole.rows] == [4, 4, 4, 4]
    assert critic_of(whole).steps == 4
    assert "loss/policy" not in whole.rows[0] and "loss/policy" in whole.rows[1]
    assert whole.column("value/mean")[0] == pytest.approx(0, abs=0.2)


def test_executed_stages_are_the_planned_ones(whole: Run) -> None:
    names = [stage.name for stage in whole.session.plan.stages]
    assert whole.session.run.progress.executed == names
    for row in whole.rows:  # nothing of the critic is left out of the best possible step
        parts = ("time/rollout", "time/values", "time/train_critic", "time/train")
        assert row["limit/step_s"] >= sum(row[part] for part in parts) - 1e-6
    assert names == [
        "rollout", "reward", "ref", "old", "values", "advantages", "train_critic", "train", "publish",
    ]  # fmt: skip


def test_b68_a_resumed_run_goes_on_with_its_critic(task: Path, whole: Run, tmp_path: Path) -> None:
    shutil.copytree(whole.output, tmp_path, dirs_exist_ok=True)
    for late in ("step_00000003", "step_00000004"):
        shutil.rmtree(tmp_path / "checkpoints" / late)
    run = train(task, f"trainer.output_dir={tmp_path}", *SMALL, "trainer.resume=auto")
    assert lines(run) == lines(whole)
    assert equal(run.weights, whole.weights)
    assert equal(critic_weights(run), critic_weights(whole))
    assert (critic_of(run).steps, critic_of(run).updates) == (4, 16)


def test_a_checkpoint_of_a_run_without_a_critic_is_refused(task: Path, tmp_path: Path) -> None:
    words = (task, "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "trainer.save_interval=1")
    train(*words, f"trainer.output_dir={tmp_path / 'grpo'}", "trainer.total_steps=1")
    saved = tmp_path / "grpo" / "checkpoints" / "step_00000001"
    with pytest.raises(ConfigError, match="the saved run has no critic"):
        prepare(*words, *PPO[:2], f"trainer.output_dir={tmp_path / 'ppo'}", f"trainer.resume={saved}")


def test_a_saved_critic_is_where_another_run_starts(task: Path, whole: Run, tmp_path: Path) -> None:
    folder = whole.output / "critic"
    plain = AutoModelForTokenClassification.from_pretrained(folder)
    assert equal(dict(plain.state_dict()), critic_weights(whole))
    with started(task, f"trainer.output_dir={tmp_path}", *PPO, f"critic.model.path={folder}") as session:
        assert equal(dict(critic_of(session).export()), critic_weights(whole))


def test_adapters_and_the_head_may_be_all_that_a_critic_trains(task: Path, tmp_path: Path) -> None:
    model = f"critic.model={{path: {task.parent / 'model'}, lora_rank: 4}}"
    run = train(task, f"trainer.output_dir={tmp_path}", *PPO, model, "trainer.total_steps=3")
    before = AutoModelForCausalLM.from_pretrained(task.parent / "model").state_dict()
    after = critic_weights(run)
    changed = {name for name, tensor in after.items() if name in before and not tensor.equal(before[name])}
    assert changed and all(name.endswith("proj.weight") for name in changed)
    assert after["score.weight"].any()


def test_a_critic_of_other_tokens_is_refused_by_the_plan(task: Path, tmp_path: Path) -> None:
    other = character_tokenizer(ALPHABET[::-1], eos="\n", pad=None)
    ids = {"eos_token_id": other.eos_token_id, "pad_token_id": other.pad_token_id}
    save_pretrained_atomic(new_model({**SHAPE, **ids, "vocab_size": len(other)}, seed=1), other, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"critic\.model\.path.*the actor's token"):
        prepare(task, *PPO, f"critic.model.path={tmp_path / 'other'}", f"trainer.output_dir={tmp_path / 'run'}")


def test_a_critic_that_embeds_too_few_tokens_is_refused(task: Path, tmp_path: Path) -> None:
    shape = {**SHAPE, "vocab_size": 5, "eos_token_id": 0, "pad_token_id": 0}
    save_pretrained_atomic(new_model(shape, seed=1), load_tokenizer(task.parent / "model"), tmp_path / "small")
    with pytest.raises(TandemError, match="embeds the ids 0 to 4"):
        prepare(task, *PPO, f"critic.model.path={tmp_path / 'small'}", f"trainer.output_dir={tmp_path / 'run'}")
