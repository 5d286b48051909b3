"""A model that is split over devices: what the plan counts, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.plan.plan import Plan
from tests.plan.folders import MODEL_CONFIG, write_model

Plans = Callable[..., Plan]

ACTOR = "actor_rollout_ref.actor"
SPLIT, ROWS = f"{ACTOR}.tensor_model_parallel_size", f"{ACTOR}.ulysses_sequence_parallel_size"
TWO = "execution.resource={actor: [1, 2]}"


def test_devices_of_one_model_see_the_same_samples(plan_of: Plans) -> None:
    words = (TWO, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096")  # 16 of the 32 samples of a step
    apart, together = (plan_of(*words, f"{SPLIT}={width}") for width in (1, 2))
    assert (apart.batch.micro_batches, together.batch.micro_batches) == (1, 2)
    assert apart.device_groups == together.device_groups
    assert plan_of(TWO, f"{SPLIT}=2", "algorithm.policy_loss.type=kl_cov").problems == ()  # one model has all of them


def test_a_split_model_needs_less_of_what_is_split(place: Path, plan_of: Plans) -> None:
    write_model(place / "model", parameters=640_000, **MODEL_CONFIG)
    words = (TWO, "actor_rollout_ref.model.dtype=bfloat16", "data.train_batch_size=1", "actor_rollout_ref.rollout.n=8")
    words += ("actor_rollout_ref.actor.ppo_micro_batch_size=4",)
    apart, together = (plan_of(*words, f"{SPLIT}={width}").memory[0].parts for width in (1, 2))
    for part in ("actor weights", "actor gradients", "actor optimizer"):
        assert apart[part] == together[part]
    assert apart["actor cast weights"] == 2 * (together["actor cast weights"] or 0)
    more, less = apart["actor activations"] or 0, together["actor activations"] or 0
    assert more / 2 < less < more  # of as many samples; what is between the halves of a layer is whole on both


@pytest.mark.parametrize(
    ("devices", "words", "reason", "remedy"),
    [
        (4, (), "2 heads of keys and values can't be split evenly over 4", "of 2"),
        (8, (), "4 attention heads can't be split evenly over 8", "of 4"),
        (8, (), "100 rows of the embedding can't be split evenly over 8", "of 100"),
        (2, ("actor_rollout_ref.model.lora_rank=4",), "a model with LoRA adapters can't be split", "Write 1"),
    ],
)
def test_what_can_not_be_split_is_refused(
    plan_of: Plans, devices: int, words: tuple[str, ...], reason: str, remedy: str
) -> None:
    problems = plan_of(f"execution.resource={{actor: [1, {devices}]}}", f"{SPLIT}={devices}", *words).problems
    (found,) = [problem for problem in problems if reason in problem.reason]
    assert found.key == SPLIT
    assert remedy in found.remedy


def test_a_family_that_is_split_in_no_known_way_is_refused_by_name(place: Path, plan_of: Plans) -> None:
    for family, wrong in (("qwen3", 0), ("gpt2", 1)):
        write_model(place / "model", **MODEL_CONFIG, model_type=family)
        reasons = [problem.reason for problem in plan_of(TWO, f"{SPLIT}=2").problems]
        assert len(reasons) == wrong
        assert all("the family gpt2 is split over devices is not known" in reason for reason in reasons)


def test_devices_that_share_rows_have_a_budget_together(plan_of: Plans) -> None:
    words = (TWO, f"{ACTOR}.ppo_max_token_len_per_gpu=128")  # a sample may have 256 tokens
    (problem,) = plan_of(*words).problems
    assert "Write at least 256" in problem.remedy
    shared = plan_of(*words, f"{ROWS}=2")
    assert shared.problems == ()
    assert shared.batch.micro_batches == 32
    (problem,) = plan_of(TWO, f"{ACTOR}.ppo_max_token_len_per_gpu=127", f"{ROWS}=2").problems
    assert "Write at least 128" in problem.remedy


def test_shared_rows_halve_what_a_device_keeps_of_them(place: Path, plan_of: Plans) -> None:
    write_model(place / "model", parameters=640_000, **MODEL_CONFIG)
    words = (TWO, "data.train_batch_size=1", "actor_rollout_ref.rollout.n=8", f"{ACTOR}.ppo_micro_batch_size=4")
    apart, together = (plan_of(*words, f"{ROWS}={width}").memory[0].parts for width in (1, 2))
    assert apart["actor activations"] == 2 * (together["actor activations"] or 0)
    assert apart["actor weights"] == together["actor weights"]


@pytest.mark.parametrize(
    ("family", "devices", "words", "reason"),
    [
        ("mamba2", 2, (), "models of the family mamba2 run a row per document, since"),
        ("qwen2_5_vl", 2, (), "samples of the family qwen2_5_vl may show images"),
        ("qwen3", 4, (), "2 heads of keys and values can't be split evenly over 4"),
        ("qwen3", 2, (f"{SPLIT}=2",), "a model that is split (tensor_model_parallel_size 2) has whole rows"),
        ("qwen3", 3, ("execution.resource={actor: [1, 4]}",), "it doesn't divide the 4 devices of actor"),
    ],
)
def test_rows_that_can_not_be_shared_are_refused(
    place: Path, plan_of: Plans, family: str, devices: int, words: tuple[str, ...], reason: str
) -> None:
    write_model(place / "model", **MODEL_CONFIG, model_type=family)
    plan = plan_of(f"execution.resource={{actor: [1, {devices}]}}", f"{ROWS}={devices}", *words)
    assert [problem.key for problem in plan.problems if reason in problem.reason] == [ROWS]


@pytest.mark.parametrize(
    ("key", "words", "reason"),
    [
        ("gather_dtype=bfloat16", (), "the actor has one device"),
        ("reduce_every=mini_batch", (), "the actor has one device"),
        ("gather_dtype=bfloat16", (TWO,), "the forward computes in float32"),
        ("reduce_dtype=bfloat16", (TWO, f"{SPLIT}=2"), "a model that is split"),
    ],
)
def test_traffic_that_there_is_none_of_is_refused(
    plan_of: Plans, key: str, words: tuple[str, ...], reason: str
) -> None:
    (found,) = [problem for problem in plan_of(f"{ACTOR}.{key}", *words).problems if reason in problem.reason]
    assert found.key == f"{ACTOR}.{key.partition('=')[0]}"
    assert found.remedy.startswith("Write ")


def test_less_traffic_between_devices_costs_and_saves_memory(place: Path, plan_of: Plans) -> None:
    less = (f"{ACTOR}.gather_dtype=bfloat16", f"{ACTOR}.reduce_dtype=bfloat16", f"{ACTOR}.reduce_every=mini_batch")
    low = (TWO, "actor_rollout_ref.model.dtype=bfloat16")
    assert plan_of(*low, *less).problems == ()
    write_model(place / "model", parameters=640_000, **MODEL_CONFIG)
    plain, plan = plan_of(*low), plan_of(*low, *less)
    assert plain.memory[0].parts["actor cast weights"] == plan.memory[0].parts["actor whole gradients"] == 2 * 640_000
    assert "actor cast weights" not in plan.memory[0].parts
