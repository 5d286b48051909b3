"""Rewards on tokens: where a score is laid, and what has no place for one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
