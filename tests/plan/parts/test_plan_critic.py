"""What the plan derives from a critic, and what it refuses of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.plan.plan import Plan
from tests.plan.folders import MODEL_CONFIG, write_model
from tests.plan.test_plan_memory import write_header

Plans = Callable[..., Plan]
PPO = ("algorithm.adv_estimator=gae", "critic.enable=true")


@pytest.fixture(autouse=True)
def other(place: Path) -> Path:
    """A second model, of a shorter context."""
    return write_model(place / "other", **{**MODEL_CONFIG, "max_position_embeddings": 200})


@pytest.mark.parametrize(
    ("words", "key", "reason", "remedy"),
    [
        (["critic.model.path=./absent"], "critic.model.path", "no such folder", "existing"),
        (
            ["critic.model.path=./other"],
            "data.max_response_length",
            "is 200",
            "longer context, or write at most 72",
        ),
        (["critic.warmup_steps=20"], "critic.warmup_steps", "never be trained", "less than 20"),
        (["critic.optim.warmup_steps=20"], "critic.optim.warmup_steps", "20 optimizer steps", "less than 20"),
        (
            ["critic.warmup_steps=15", "actor_rollout_ref.actor.optim.warmup_steps=5"],
            "actor_rollout_ref.actor.optim.warmup_steps",
            "5 optimizer steps",
            "less than 5",
        ),
        (
            ["critic.ppo_max_token_len_per_gpu=255"],
            "critic.ppo_max_token_len_per_gpu",
            "256 tokens",
            "at least 256",
        ),
        (["critic.model={path: model, dtype: bfloat16}", "trainer.exact=true"], "trainer.exact", "critic", "float32"),
        (
            ["critic.model={path: model, lora_rank: 2, lora_target_modules: []}"],
            "critic.model.lora_target_modules",
            "nothing",
            "all-linear",
        ),
        (["--hybrid", "--train-pipelining", "accumulate"], "execution.train_pipelining", "critic", "off"),
        (["--hybrid", "--train-pipelining", "step"], "execution.train_pipelining", "critic", "off"),
        (["algorithm.adv_estimator=rloo"], "critic.enable", "nothing reads its values", "gae"),
        (["critic.enable=false"], "algorithm.adv_estimator", "only a critic gives", "critic.enable: true"),
    ],
)
def test_refused(plan_of: Plans, words: list[str], key: str, reason: str, remedy: str) -> None:
    problems = [problem for problem in plan_of(*PPO, *words).problems if reason in problem.reason]
    assert [problem.key for problem in problems] == [key]
    assert remedy in problems[0].remedy


@pytest.mark.parametrize(
    "words",
    [
        ["critic.optim.warmup_steps=39", "critic.ppo_epochs=2"],
        ["critic.warmup_steps=19"],
        ["critic.ppo_max_token_len_per_gpu=256"],
        ["critic.cliprange_value=null"],
        ["--hybrid", "critic.model={path: model, lora_rank: 4}"],
        ["--fully-async", "algorithm.kl.in=reward"],
    ],
)
def test_accepted(plan_of: Plans, words: list[str]) -> None:
    plan = plan_of(*PPO, *words)
    assert plan.problems == plan.later == ()


def test_keys_of_a_critic_that_is_off_are_noted(plan_of: Plans) -> None:
    assert any("critic" in note for note in plan_of("critic.warmup_steps=3").notes)
    assert not any("critic" in note for note in plan_of().notes + plan_of(*PPO, "critic.warmup_steps=3").notes)


def test_steps_of_warm_up_are_no_steps_of_the_actor(plan_of: Plans) -> None:
    words = ("critic.warmup_steps=5", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    assert plan_of(*PPO, *words).batch.optimizer_steps_in_all == 15 * 2
    assert plan_of(*PPO).batch.optimizer_steps_in_all == plan_of("critic.warmup_steps=5").batch.steps == 20


def test_where_the_critic_is_placed(plan_of: Plans) -> None:
    def group(*words: str) -> str:
        placed = {placement.role: placement.group for placement in plan_of(*PPO, *words).placements}
        return placed["critic"]

    assert group() == "shared"
    assert group("--hybrid") == "actor"
    assert group("--hybrid", "execution.resource={critic: [1, 1]}") == "critic"
    assert group("--fully-async") == "critic"


def test_its_memory_is_that_of_its_own_model(place: Path, other: Path, plan_of: Plans) -> None:
    write_header(place / "model", {"a": [1000, 640]})
    write_header(other, {"a": [100, 64]})
    (shared,) = plan_of(*PPO).memory
    assert shared.parts["critic optimizer"] == shared.parts["actor optimizer"] == 8 * 640_000
    assert "critic log-probs" not in shared.parts and "actor log-probs" in shared.parts
    (own,) = plan_of(*PPO, "critic.model.path=./other").memory
    assert own.parts["critic optimizer"] == 8 * 6400
    assert own.parts["actor optimizer"] == 8 * 640_000
