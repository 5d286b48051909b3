"""Rewards on tokens: where a score is laid, and what has no place for one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.config.schema import AlgorithmConfig
from tandem.roles.advantages import AdvantageStage, token_rewards


def batch(lengths: list[int], rewards: list[float]) -> DataProto:
    """One group; every token is trained."""
    mask = Ragged.from_lengths(torch.ones(sum(lengths), dtype=torch.bool), lengths)
    return DataProto(
        {
            "responses": mask.like(torch.ones(sum(lengths), dtype=torch.int64)),
            "response_mask": mask,
            "rewards": torch.tensor(rewards),
            "reward_valid": torch.tensor(rewards).isfinite(),
            "group_ids": torch.zeros(len(lengths), dtype=torch.int64),
        }
    )


def test_b07_an_empty_answer_has_no_place_for_its_reward() -> None:
    laid = token_rewards(torch.tensor([10.0, 1.0]), torch.tensor([[False, False, False], [True, True, False]]))
    assert laid.tolist() == [[0, 0, 0], [0, 1, 0]]
    alone = token_rewards(torch.tensor([10.0]), torch.zeros(1, 0, dtype=torch.bool))
    assert alone.shape == (1, 0)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@given(lengths=st.lists(st.integers(1, 4), min_size=2, max_size=4), reward=st.floats(-100, 100))
def test_b07_peers_of_an_empty_answer_are_unaffected(estimator: str, lengths: list[int], reward: float) -> None:
    stage = AdvantageStage.of(AlgorithmConfig.model_validate({"adv_estimator": estimator}))
    scores = [float(i % 2) for i in range(len(lengths))]
    without = stage(batch(lengths, scores)).ragged("advantages").rows()
    with_empty = stage(batch([*lengths, 0], [*scores, reward]))
    rows = with_empty.ragged("advantages").rows()
    assert len(rows[-1]) == len(with_empty.ragged("token_rewards").rows()[-1]) == 0
    for peer, alone in zip(rows[:-1], without, strict=True):
        assert torch.equal(peer, alone)


def test_the_score_lies_on_the_last_trained_token_and_a_failed_one_nowhere() -> None:
    mask = torch.tensor([[True, True, False, True], [True, False, False, False]])
    assert token_rewards(torch.tensor([2.0, float("nan")]), mask).tolist() == [[0, 0, 0, 2], [0, 0, 0, 0]]


def brought(rewards: list[float], given: list[float]) -> tuple[AdvantageStage, DataProto]:
    """Answers of two tokens; ``given`` are the rewards that a stage put on all tokens in a row."""
    algorithm = AlgorithmConfig.model_validate({"adv_estimator": "reinforce_plus_plus"})
    samples = batch([2] * len(rewards), rewards)
    column = samples.ragged("response_mask").like(torch.tensor(given))
    return AdvantageStage.of(algorithm, added=True), samples.union(DataProto({"token_rewards": column}))


def test_the_reward_of_the_answer_is_added_to_those_that_a_stage_gave_its_tokens() -> None:
    stage, samples = brought([1.0, 0.0], [0.5, 0.25, 0.0, 2.0])
    done = stage(samples)
    assert done.padded("returns").tolist() == [[1.75, 1.25], [2.0, 2.0]]
    assert torch.equal(done.ragged("token_rewards").values, samples.ragged("token_rewards").values)
    assert stage.metrics["reward/tokens"] == pytest.approx((0.75 + 2.0) / 2)


def test_rewards_on_tokens_that_are_not_trained_count_nowhere() -> None:
    stage, samples = brought([1.0, 0.0], [0.5, 0.25, float("nan"), 9.0])
    masked = samples.ragged("response_mask").like(torch.tensor([True, True, False, False]))
    samples.batch["response_mask"] = masked
    assert stage(samples).padded("returns").tolist() == [[1.75, 1.25], [0.0, 0.0]]
    assert stage.metrics["reward/tokens"] == pytest.approx(0.75)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_of_a_stage_that_is_no_number_is_refused(value: float) -> None:
    stage, samples = brought([1.0, 0.0], [0.5, 0.25, 0.0, value])
    with pytest.raises(ContractError, match="token_rewards of 1 of 2 samples are no numbers, the first in row 1"):
        stage(samples)
