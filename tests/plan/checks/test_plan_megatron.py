"""Strategy megatron in the plan: what it counts, what it refuses by name, and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.base.errors import ConfigError
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.plan import later
from tandem.plan.own_loop import check_own_loop
from tandem.plan.plan import Plan
from tests.plan.folders import MODEL_CONFIG, write_model

Plans = Callable[..., Plan]

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.strategy=megatron"
TWO = "execution.resource={actor: [1, 2]}"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "_has_megatron", lambda: True)


def test_one_line_of_config_chooses_it_and_each_mode_has_weights_to_push(plan_of: Plans) -> None:
    for mode in ("colocate", "hybrid", "fully_async"):
        plan = plan_of(MEGATRON, f"execution.mode={mode}")
        assert plan.problems == () and plan.later == ()
        assert plan.pushed == "merged"  # the engine can't generate with parameters that Megatron-core laid out
    assert plan_of().pushed == "nothing"


def test_where_the_package_is_missing_it_is_named(plan_of: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "_has_megatron", lambda: False)
    with pytest.raises(ConfigError, match=r"needs the package megatron-core.*tandem-rl\[megatron\]"):
        plan_of(MEGATRON).require_runnable()


@pytest.mark.parametrize(
    ("config", "words", "key", "reason"),
    [
        ({"model_type": "gemma2"}, (), "strategy", "the family gemma2 is which in Megatron-core is not known"),
        ({"attention_bias": True}, (), "strategy", "attention_bias: True"),
        ({}, ("actor_rollout_ref.model.lora_rank=4",), "strategy", "no LoRA adapters"),
        ({}, ("algorithm.policy_loss.type=dpo",), "strategy", "preferences are learned with another engine"),
        ({}, (TWO, f"{ACTOR}.ulysses_sequence_parallel_size=2"), "ulysses_sequence_parallel_size", "no context par"),
        ({}, ("execution.resource={actor: [1, 4]}", f"{ACTOR}.tensor_model_parallel_size=4"),
         "tensor_model_parallel_size", "2 heads of keys and values can't be split evenly over 4"),
    ],
)  # fmt: skip
def test_what_it_can_not_train_is_refused_before_a_model_is_loaded(
    place: Path, plan_of: Plans, config: dict[str, object], words: tuple[str, ...], key: str, reason: str
) -> None:
    write_model(place / "model", **{**MODEL_CONFIG, **config})
    found = [problem for problem in plan_of(MEGATRON, *words).problems if reason in problem.reason]
    assert [problem.key for problem in found] == [f"{ACTOR}.{key}"]
    assert reason not in str(plan_of(*words).problems) or key == "tensor_model_parallel_size"


def test_data_parallel_ranks_of_it_hold_all_and_split_ones_a_part(place: Path, plan_of: Plans) -> None:
    write_model(place / "model", parameters=640_000, **MODEL_CONFIG)
    one, apart, together = (
        plan_of(MEGATRON, *words).memory[0].parts
        for words in ((), (TWO,), (TWO, f"{ACTOR}.tensor_model_parallel_size=2"))
    )
    for part in ("actor weights", "actor gradients", "actor optimizer"):
        assert one[part] == apart[part] == 2 * (together[part] or 0)


def test_a_loop_of_ones_own_has_none(plan_of: Plans, place: Path) -> None:
    config = load_words(["run.yaml", MEGATRON], Config)
    assert [p.key for p in check_own_loop(config, plan_of(MEGATRON))] == [f"{ACTOR}.strategy"]
