"""Preference training in a plan: what follows from the loss's signature, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.algorithms import PREFERENCE_LOSSES
from tandem.base.errors import Problem
from tandem.plan.plan import Plan

LOSS = "algorithm.policy_loss"
DPO = f"{LOSS}.type=dpo"
Plans = Callable[..., Plan]
Problems = Callable[..., list[Problem]]


@pytest.fixture
def pairs(place: Path) -> Path:
    """``place`` with preferences as its training file, and other files beside them."""
    (place / "prompts.jsonl").write_text((place / "train.jsonl").read_text())
    rows = [{"prompt": f"{x}+1=", "chosen": str(x + 1), "rejected": str(x), "good": x % 2 == 0} for x in range(40)]
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "val.jsonl").write_text(json.dumps(rows[0]) + "\n")
    return place


@pytest.mark.parametrize("name", PREFERENCE_LOSSES.names())
def test_stages_tags_and_roles_follow_from_the_signature(pairs: Path, plan_of: Plans, name: str) -> None:
    plan = plan_of(f"{LOSS}.type={name}")
    assert plan.problems == plan.later == ()
    columns = PREFERENCE_LOSSES[name].signature.columns
    forwards = [column.removesuffix("_logprobs") for column in ("ref_logprobs", "reference_point") if column in columns]
    assert [stage.name for stage in plan.stages] == [*forwards, "train"]
    assert plan.tags == (("actor", "ref") if "ref_logprobs" in columns else ("actor",))
    assert (plan.loop, plan.roles, plan.devices) == ("preference", ("actor",), 1)
    assert set(columns) - {"logprobs"} <= set(plan.stages[-1].needs)
    assert {"rewards", "rollout_logprobs", "advantages"}.isdisjoint(plan.source_columns)


def test_a_pair_is_two_samples_and_a_labelled_row_one(pairs: Path, plan_of: Plans) -> None:
    paired, labelled = plan_of(DPO), plan_of(f"{LOSS}.type=kto", "data.label_key=good", "data.response_key=chosen")
    assert (paired.batch.prompts, paired.batch.samples) == (8, 16)
    assert (labelled.batch.samples, labelled.problems) == (8, ())
    assert plan_of(DPO, "actor_rollout_ref.actor.global_batch_size=8").batch.mini_batch_prompts == 4


def test_sections_that_nothing_reads_are_noted_and_may_stay(pairs: Path, plan_of: Plans) -> None:
    unread = ("reward_manager.type=gsm8k", "algorithm.adv_estimator=rloo", "actor_rollout_ref.teacher.path=model")
    plan = plan_of(DPO, *unread)
    assert plan.problems == ()
    (told,) = [note.partition(" are not used")[0].split(", ") for note in plan.notes if "not used" in note]
    assert set(told) == {
        "reward_manager.type",
        "algorithm.adv_estimator",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.teacher.path",
    }


@pytest.mark.parametrize(
    ("column", "value", "words", "key", "told"),
    [
        ("chosen", 2, "", "data.chosen_key", "not a int"),
        ("rejected", None, "", "data.rejected_key", "not a NoneType"),
        ("rejected", [{"role": "assistant"}], "", "data.rejected_key", "has no content"),
        ("good", "yes", "data.label_key=good data.response_key=chosen", "data.label_key", "neither true nor false"),
    ],
)
def test_the_first_pair_is_read_as_what_it_must_be(
    pairs: Path, problems_of: Problems, column: str, value: object, words: str, key: str, told: str
) -> None:
    rows = [json.loads(line) for line in (pairs / "train.jsonl").read_text().splitlines()]
    rows[0][column] = value
    (pairs / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loss = f"{LOSS}.type={'kto' if words else 'dpo'}"
    (problem,) = problems_of(loss, *words.split())
    assert problem.key == key and told in problem.reason and "row 1" in problem.reason
    assert problems_of(loss, *words.split(), "data.on_bad_row=drop") == []


# words | key | part of the reason | part of the remedy
REFUSALS = [
    ("execution.mode=hybrid", "execution.mode", "nothing is generated", "colocate"),
    ("execution.mode=fully_async", "execution.mode", "nothing is generated", "colocate"),
    ("critic.enable=true", "critic.enable", "no rewards", "false"),
    ("algorithm.kl.in=loss", "algorithm.kl.in", "no KL term", "off"),
    ("algorithm.entropy_coef=0.1", "algorithm.entropy_coef", "no such term", "Leave it out"),
    ("algorithm.use_tis=true", "algorithm.use_tis", "no such term", "Leave it out"),
    ("algorithm.rollout_correction.weights=token", "algorithm.rollout_correction.weights", "no such term", "Leave"),
    ("algorithm.loss_agg_mode=token-sum", "algorithm.loss_agg_mode", "no such term", "Leave it out"),
    ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.enable", "no such term", "Leave"),
    ("actor_rollout_ref.rollout.temperature=0.5", "actor_rollout_ref.rollout.temperature", "temperature 1", "1.0"),
    (f"{LOSS}.beta=0", f"{LOSS}.beta", "must be > 0", "0.1"),
    (f"{LOSS}.beta=-1", f"{LOSS}.beta", "must be > 0", "0.1"),
    (f"{LOSS}.beta='x'", f"{LOSS}.beta", "a text where a number", "0.1"),
    (f"{LOSS}.betta=0.1", f"{LOSS}.betta", "no parameter", "'beta'"),
    (f"{LOSS}.label_smoothing=0.5", f"{LOSS}.label_smoothing", "a label is wrong", "0.5"),
    (f"{LOSS}={{type: kto, desirable_weight: -1}}", f"{LOSS}.desirable_weight", "must be >= 0", "1.0"),
    (f"{LOSS}={{type: kto, desirable_weight: 0, undesirable_weight: 0}}", f"{LOSS}.desirable_weight", "both weigh 0",
     "above 0"),
    (f"{LOSS}.type=kto data.train_batch_size=1", "data.train_batch_size", "answers to other prompts", "2 or more"),
    ("data.label_key=good data.response_key=chosen", "data.label_key", "labelled rows have one each", "kto"),
    ("data.chosen_key=win", "data.chosen_key", "no column 'win'", "ppo_clip"),
    ("data.train_files=[prompts.jsonl] data.chosen_key=answer", "data.rejected_key", "no column", "ppo_clip"),
    (f"{LOSS}.type=kto data.label_key=god data.response_key=chosen", "data.label_key", "did you mean 'good'", "label"),
    ("data.val_files=[train.jsonl]", "data.val_files[0]", "trained on", "Split"),
    ("data.template='{x}'", "data.template", "no column 'x'", "column"),
    ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=300", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
     "a pair stays in one micro-batch", "512"),
    ("data.train_files=[] data.reasoning_gym={dataset: a}", "data.reasoning_gym", "given answers", "data.source"),
    ("evaluation.interval=5", "evaluation.interval", "no held-out", "val_files"),
    ("execution.resource={rollout: [1, 1]}", "execution.resource.rollout", "no role of its own", "actor"),
    ("actor_rollout_ref.ref.update_interval=5 algorithm.policy_loss.type=orpo",
     "actor_rollout_ref.ref.update_interval", "no reference", "dpo, ipo, kto"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "key", "reason", "remedy"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_refused(pairs: Path, problems_of: Problems, words: str, key: str, reason: str, remedy: str) -> None:
    split = words.replace(" {", "\0{").replace(": ", ":\0").replace(", ", ",\0").split(" ")
    found = problems_of(DPO, *(word.replace("\0", " ") for word in split))
    assert [problem.key for problem in found] == [key], [str(problem) for problem in found]
    assert reason in found[0].reason and remedy in found[0].remedy


def test_a_loss_on_rewards_is_told_of_preferences(pairs: Path, problems_of: Problems) -> None:
    (found,) = problems_of()
    assert found.key == "data.answer_key" and "algorithm.policy_loss.type: dpo" in found.remedy


def test_a_loss_that_wants_what_preferences_lack_is_refused(pairs: Path, problems_of: Problems) -> None:
    def moody(logprobs: object, preferred: object, mood: object) -> None:
        """Not Tandem's."""

    PREFERENCE_LOSSES.register("moody")(moody)  # type: ignore[arg-type]
    try:
        (found,) = problems_of(f"{LOSS}.type=moody")
        assert found.key == f"{LOSS}.type" and "'mood'" in found.reason and "preferred" in found.remedy
    finally:
        del PREFERENCE_LOSSES._entries["moody"]
