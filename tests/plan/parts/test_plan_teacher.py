"""Whom the actor learns from: what the plan derives from a teacher, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import Problem
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.plan.plan import Plan
from tests.plan.folders import MODEL_CONFIG, write_model

REVERSE = "algorithm.distillation={type: reverse_kl}"
ONLY = "algorithm.distillation={type: reverse_kl, only: true}"
TOP = "algorithm.distillation={type: forward_kl_topk, top_k: 20}"
TAUGHT = "actor_rollout_ref.teacher.path=teacher"
VOCABULARY = {chr(97 + i): i for i in range(26)}

PlanOf = Callable[..., Plan]
ProblemsOf = Callable[..., list[Problem]]


def make_model(folder: Path, vocabulary: Any = None, added: tuple[str, ...] = (), **changes: Any) -> None:
    """A folder with the config and the tokenizer of a model, as far as a plan reads them."""
    write_model(folder, **{**MODEL_CONFIG, **changes})
    vocabulary = VOCABULARY if vocabulary is None else vocabulary
    tokens = [{"id": len(vocabulary) + i, "content": content} for i, content in enumerate(added)]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": tokens}))


@pytest.fixture(autouse=True)
def models(place: Path) -> None:
    """The actor's model with a tokenizer, and others beside it."""
    make_model(place / "model")
    make_model(place / "teacher", dtype="float32", transformers_version="4.0")
    make_model(place / "deep", num_hidden_layers=4)
    make_model(place / "rope", rope_theta=500000.0)
    make_model(place / "wide_vocabulary", vocab_size=128)
    make_model(place / "narrow_vocabulary", vocab_size=20)
    make_model(place / "short", max_position_embeddings=128)
    make_model(place / "moved", {**VOCABULARY, "a": 1, "b": 0})
    make_model(place / "more", added=("<tool>",))
    (place / "adapter").mkdir()
    (place / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    make_model(place / "unigram", [[token, 0.0] for token in VOCABULARY])
    write_model(place / "bare", **MODEL_CONFIG)
    (place / "bare" / "tokenizer.json").rename(place / "bare" / "tokenizer.model")


def stage(plan: Plan, name: str) -> Any:
    (found,) = (stage for stage in plan.stages if stage.name == name)
    return found


# -- what follows --


def test_a_teacher_of_the_actors_architecture_is_a_tag_between_ref_and_old(plan_of: PlanOf) -> None:
    plan = plan_of(REVERSE, TAUGHT, "algorithm.kl.in=loss", "algorithm.old_logprobs=recompute")
    assert plan.problems == () and plan.later == ()
    assert plan.tags == ("actor", "ref", "teacher") and plan.roles == ("actor", "rollout")
    names = [s.name for s in plan.stages]
    assert names[2:6] == ["ref", "teacher", "old", "advantages"]
    found = stage(plan, "teacher")
    assert (found.role, found.tag, found.gives) == ("actor", "teacher", ("teacher_logprobs",))
    assert {"advantages", "teacher_logprobs"} <= set(stage(plan, "train").needs)


def test_columns_follow_from_the_objective(plan_of: PlanOf) -> None:
    plan = plan_of(TOP, TAUGHT, "execution={mode: hybrid, num_iters_per_train_update: 4}")
    found = stage(plan, "teacher")
    assert found.gives == ("teacher_topk_logprobs", "teacher_topk_ids") and found.phase == "sub_batch"
    assert set(found.gives) <= set(stage(plan, "train").needs)


@pytest.mark.parametrize("words", [(), ("algorithm.distillation={coef: 0.0}", TAUGHT)])
def test_without_distillation_or_with_weight_0_nobody_teaches(plan_of: PlanOf, words: tuple[str, ...]) -> None:
    plan = plan_of(*words)
    assert plan.problems == () and plan.teachers == () and plan.tags == ("actor",)
    assert all(s.name != "teacher" for s in plan.stages)
    assert any("coef is 0" in note for note in plan.notes) is bool(words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("actor_rollout_ref.teacher.path=deep",), "num_hidden_layers 4"),
        (("actor_rollout_ref.teacher.path=rope",), "rope_theta 500000.0"),
        (("actor_rollout_ref.teacher.path=wide_vocabulary",), "vocab_size 128"),
        ((TAUGHT, "actor_rollout_ref.model.lora_rank=4"), "LoRA"),
        ((TAUGHT, "actor_rollout_ref.teacher.by_source={x: deep}"), "num_hidden_layers 4"),
    ],
)
def test_else_it_is_a_model_of_its_own_and_the_plan_says_why(plan_of: PlanOf, words: tuple[str, ...], why: str) -> None:
    for mode, group in (("colocate", "shared"), ("hybrid", "actor")):
        plan = plan_of(REVERSE, *words, f"execution.mode={mode}")
        assert plan.problems == () and "teacher" not in plan.tags
        (placed,) = (p for p in plan.placements if p.role == "teacher")
        assert placed.group == group and plan.devices == (1 if mode == "colocate" else 2)
        assert stage(plan, "teacher").role == "teacher" and stage(plan, "teacher").tag is None
        assert any("not a tag" in note and why in note for note in plan.notes)


def test_fully_async_has_a_role_for_it(plan_of: PlanOf) -> None:
    plan = plan_of(REVERSE, TAUGHT, "execution={mode: fully_async, resource: {teacher: [1, 1]}}")
    assert plan.problems == () and plan.tags == ("actor",)
    assert plan.roles == ("actor", "rollout", "advantages", "teacher", "actor_fwd") and plan.devices == 4
    alone = plan_of(ONLY, TAUGHT, "execution.mode=fully_async")
    assert alone.problems == () and alone.roles == ("actor", "rollout", "teacher", "actor_fwd")


def test_teachers_by_source_are_loaded_once_each(plan_of: PlanOf) -> None:
    plan = plan_of(
        REVERSE, "actor_rollout_ref.teacher={path: teacher, by_source: {a: unigram, b: teacher, c: unigram}}"
    )
    assert plan.problems == ()
    assert [(t.name, t.path, t.sources, t.rest) for t in plan.teachers] == [
        ("teacher", "teacher", ("b",), True),
        ("teacher:a", "unigram", ("a", "c"), False),
    ]
    assert plan.tags == ("actor", "teacher", "teacher:a")
    assert "data_source" in stage(plan, "teacher").needs


def test_alone_it_needs_neither_reward_nor_groups_nor_advantages(plan_of: PlanOf, place: Path) -> None:
    plan = plan_of(ONLY, TAUGHT, "actor_rollout_ref.rollout.n=1", "data.answer_key=null", "algorithm.adv_estimator=gae")
    assert plan.problems == ()
    assert all(s.name != "advantages" for s in plan.stages) and "advantages" not in stage(plan, "train").needs
    words = [str(place / "run.yaml"), ONLY, TAUGHT]
    assert load_words(words, Config).reward_manager.type == "none"
    assert load_words([*words, "reward_manager.type=exact"], Config).reward_manager.type == "exact"
    assert any("train nothing" in note for note in plan_of(ONLY, TAUGHT, "reward_manager.type=exact").notes)


def test_it_may_be_pipelined(plan_of: PlanOf) -> None:
    pipelined = "execution={mode: hybrid, num_iters_per_train_update: 4, train_pipelining: accumulate}"
    estimator = "algorithm.adv_estimator=reinforce_plus_plus"
    assert plan_of(REVERSE, TAUGHT, pipelined).problems == ()
    assert plan_of(ONLY, TAUGHT, pipelined, estimator).problems == ()  # nothing is estimated
    assert [p.key for p in plan_of(REVERSE, TAUGHT, pipelined, estimator).problems] == ["execution.train_pipelining"]


def test_vocabularies_that_cant_be_read_are_compared_later(plan_of: PlanOf) -> None:
    plan = plan_of(REVERSE, "actor_rollout_ref.teacher.path=bare")
    assert plan.problems == () and any("can't be compared" in note for note in plan.notes)
    assert plan_of(REVERSE, "actor_rollout_ref.teacher.path=unigram").problems == ()


def test_its_weights_are_in_the_memory(plan_of: PlanOf, place: Path) -> None:
    import torch
    from safetensors.torch import save_file

    for name in ("model", "teacher", "deep"):
        save_file({"w": torch.zeros(1000 if name != "deep" else 3000)}, place / name / "model.safetensors")
    tagged, own = (plan_of(REVERSE, f"actor_rollout_ref.teacher.path={name}").memory[0] for name in ("teacher", "deep"))
    assert tagged.parts["actor other tags"] == 2 * 4000 and "teacher weights" not in tagged.parts
    assert own.parts["teacher weights"] == 12000 and "actor other tags" not in own.parts


# -- what is refused --

REFUSED = [
    ((REVERSE,), "actor_rollout_ref.teacher.path", "none is named", "by_source"),
    ((TAUGHT,), "actor_rollout_ref.teacher.path", "nothing is learned", "reverse_kl"),
    (("actor_rollout_ref.teacher.by_source={train: teacher}",), "actor_rollout_ref.teacher.by_source", "nothing", ""),
    (("algorithm.distillation.type=reverse_kll", TAUGHT), "algorithm.distillation.type", "unknown", "'reverse_kl'"),
    ((f"{REVERSE[:-1]}, top_k: 9}}", TAUGHT), "algorithm.distillation.top_k", "no parameter", "discount"),
    ((f"{REVERSE[:-1]}, onyl: true}}", TAUGHT), "algorithm.distillation.onyl", "no parameter", "'only'"),
    ((f"{REVERSE[:-1]}, discount: 1.5}}", TAUGHT), "algorithm.distillation.discount", "must be <= 1", ">= 0 and <= 1"),
    ((f"{TOP[:-3]}0}}", TAUGHT), "algorithm.distillation.top_k", "must be > 0", "64"),
    ((f"{TOP[:-3]}101}}", TAUGHT), "algorithm.distillation.top_k", "26", "1 to 26"),
    (
        ("algorithm.distillation={type: jsd_topk, beta: 1.0, top_k: 20}", TAUGHT),
        "algorithm.distillation.beta",
        "must be < 1",
        "> 0 and < 1",
    ),
    (("algorithm.distillation.coef=-1", TAUGHT), "algorithm.distillation.coef", "", "0"),
    (("algorithm.distillation={only: true, coef: 0}",), "algorithm.distillation.coef", "weight is 0", "above 0"),
    ((REVERSE, "actor_rollout_ref.teacher.path=./absent"), "actor_rollout_ref.teacher.path", "no such folder", ""),
    ((REVERSE, "actor_rollout_ref.teacher.path=adapter"), "actor_rollout_ref.teacher.path", "adapter", "Merge it"),
    ((REVERSE, "actor_rollout_ref.teacher.path=moved"), "actor_rollout_ref.teacher.path", "'a' has id 0", "token ids"),
    ((REVERSE, "actor_rollout_ref.teacher.path=more"), "actor_rollout_ref.teacher.path", "'<tool>' has id none", ""),
    ((REVERSE, "actor_rollout_ref.teacher.path=narrow_vocabulary"), "actor_rollout_ref.teacher.path", "id 25", ""),
    ((REVERSE, "actor_rollout_ref.teacher.path=short"), "actor_rollout_ref.teacher.path", "256 tokens", "longer"),
    (
        (REVERSE, "actor_rollout_ref.teacher.by_source={train: ./absent}"),
        "actor_rollout_ref.teacher.by_source.train",
        "no such folder",
        "",
    ),
    (
        (REVERSE, "actor_rollout_ref.teacher.by_source={sums: teacher}"),
        "actor_rollout_ref.teacher.by_source",
        "prompts of 'train' have no teacher",
        "by_source.train",
    ),
    ((ONLY, TAUGHT, "algorithm.filter_groups.enable=true"), "algorithm.filter_groups.enable", "rewards", "only: false"),
    ((ONLY, TAUGHT, "algorithm.kl.in=reward"), "algorithm.kl.in", "no reward", "loss"),
    ((ONLY, TAUGHT, "critic.enable=true"), "critic.enable", "estimate rewards", "false"),
    ((ONLY, TAUGHT, "evaluation.interval=5", "data.val_files=[val.jsonl]"), "evaluation.interval", "no scorer", ""),
    (("reward_manager.type=none",), "reward_manager.type", "nothing is scored", "only: true"),
    (
        (REVERSE, TAUGHT, "execution={mode: hybrid, resource: {teacher: [1, 1]}}"),
        "execution.resource.teacher",
        "tag here",
        "Remove",
    ),
    (
        ("execution={mode: fully_async, resource: {teacher: [1, 1]}}",),
        "execution.resource.teacher",
        "nothing is learned",
        "algorithm.distillation",
    ),
]


@pytest.mark.parametrize(("words", "key", "reason", "remedy"), REFUSED, ids=[str(case[0]) for case in REFUSED])
def test_contradictions_are_refused(
    problems_of: ProblemsOf, words: tuple[str, ...], key: str, reason: str, remedy: str
) -> None:
    problems = problems_of(*words)
    assert [problem.key for problem in problems] == [key]
    assert reason in problems[0].reason and remedy in problems[0].remedy


def test_it_may_have_devices_of_its_own_in_hybrid(plan_of: PlanOf) -> None:
    words = "execution={mode: hybrid, resource: {actor: [1, 2], teacher: [1, 1]}}"
    plan = plan_of(REVERSE, "actor_rollout_ref.teacher.path=deep", words)
    assert plan.problems == () and plan.device_groups == {"actor": 2, "rollout": 1, "teacher": 1}
