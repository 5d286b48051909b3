"""Preferences as batches, mismatched pairs, the evaluation; and the same update on one rank and on two."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.data.preferences import Answer, Preference
from tandem.roles.loss import Loss
from tandem.roles.preferences import PreferenceEvaluator, as_groups, mismatched, with_reference_point
from tandem.stages.stage import BatchStage
from tandem.train.preference import PreferenceObjective
from tests.roles.rank_processes import group_of
from tests.roles.test_actor import actor_of, build

PAIRS = [
    Preference(
        f"0:{i}",
        tuple(range(1, 3 + i)),
        f"prompt {i}",
        (Answer([i + 1] * (1 + i), [1] * (1 + i), True), Answer([i + 6] * (4 - i), [1] * (4 - i), False)),
    )
    for i in range(4)
]


def test_a_preference_is_a_group_of_its_answers_the_better_one_first() -> None:
    batch = as_groups(PAIRS[:2])
    assert batch.dense("group_ids").tolist() == [0, 0, 1, 1]
    assert batch.dense("preferred").tolist() == [True, False, True, False]
    assert [row.tolist() for row in batch.ragged("prompts")] == [[1, 2], [1, 2], [1, 2, 3], [1, 2, 3]]
    assert [row.tolist() for row in batch.ragged("responses")] == [[1], [6] * 4, [2, 2], [7] * 3]
    assert batch.non_tensor_batch["uid"] == ["0:0", "0:0", "0:1", "0:1"]


def test_mismatched_pairs_are_prompts_with_answers_to_the_next_one() -> None:
    batch = as_groups(PAIRS)
    for order in (torch.arange(8), torch.tensor([5, 0, 3, 7, 1, 2, 6, 4])):
        found = mismatched(batch.reorder(order))
        assert [len(row) for row in found.ragged("prompts")] == [2, 2, 3, 3, 4, 4, 5, 5]
        assert [row.tolist() for row in found.ragged("responses")][:2] == [[2, 2], [7] * 3]
        assert [row.tolist() for row in found.ragged("responses")][-2:] == [[1], [6] * 4]


def test_the_reference_point_is_zero_at_the_start_and_the_log_ratio_of_mismatched_pairs_later() -> None:
    actor, batch = actor_of(), as_groups(PAIRS)
    assert with_reference_point(batch, actor).dense("reference_point").tolist() == pytest.approx([0.0] * 8, abs=1e-5)
    objective = PreferenceObjective("dpo", {"beta": 5.0})
    for _ in range(3):
        actor.step(Loss(actor.ref_logprobs(batch), objective))
    scored = actor.ref_logprobs(actor.old_logprobs(mismatched(batch)))
    ratios = [
        float((now - ref).sum())
        for now, ref in zip(scored.ragged("old_logprobs"), scored.ragged("ref_logprobs"), strict=True)
    ]
    z = max(0.0, sum(ratios) / 8)
    assert with_reference_point(batch, actor).dense("reference_point").tolist() == pytest.approx([z] * 8, abs=1e-5)


def test_the_evaluation_is_over_all_held_out_preferences_at_once() -> None:
    actor, batch = actor_of(), as_groups(PAIRS)
    read = ("prompts", "responses", "response_mask")
    ref = BatchStage("ref", read, ("ref_logprobs",), actor.ref_logprobs)
    found = PreferenceEvaluator(PAIRS, actor, [ref], PreferenceObjective("dpo")).metrics()
    assert found["eval/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert found["eval/chosen_logprob"] < 0
    for _ in range(3):
        actor.step(Loss(actor.ref_logprobs(batch), PreferenceObjective("dpo", {"beta": 5.0})))
    mismatch = BatchStage("z", read, ("reference_point",), partial(with_reference_point, actor=actor))
    found = PreferenceEvaluator(PAIRS, actor, [ref, mismatch], PreferenceObjective("kto")).metrics()
    z = float(with_reference_point(batch, actor).dense("reference_point")[0])
    assert found["eval/reference_point"] == pytest.approx(z, abs=1e-6)


def given(batch: DataProto) -> DataProto:
    """The batch with log-probs of a reference that is not the model."""
    responses = batch.ragged("responses")
    noise = torch.randn(len(responses.values), generator=torch.Generator().manual_seed(1))
    columns = {"ref_logprobs": responses.like(noise - 3.1), "reference_point": torch.full((len(batch),), 0.2)}
    return batch.union(DataProto(dict[str, torch.Tensor | Ragged](columns)))


@pytest.mark.parametrize("name", ["dpo", "kto", "orpo"])
def test_two_ranks_make_the_update_of_one(tmp_path: Path, name: str) -> None:
    batch = given(as_groups(PAIRS[:3]))
    with group_of(0, build, tmp_path) as one, group_of(2, build, tmp_path) as two:
        found = []
        for ranks in (one, two):
            actor = actor_of(ranks, reference=False)
            metrics = actor.step(Loss(batch, PreferenceObjective(name)))
            found.append((metrics, {key: value.clone() for key, value in actor.export()}))
    (alone, weights), (together, others) = found
    for key in ("loss/policy", "grad/norm", "preference/accuracy", "preference/chosen_reward"):
        assert together[key] == pytest.approx(alone[key], rel=1e-5), key
    for key, value in weights.items():
        torch.testing.assert_close(value, others[key], atol=1e-6, rtol=1e-5)
