"""Advantage estimators: hand-computed values, invariants, and cases of faults seen elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms import ADVANTAGES
from tandem.algorithms.advantage import dr_grpo, gae, grpo, reinforce_plus_plus, rloo
from tandem.base.errors import ContractError
from tandem.base.registry import Scope
from tests.algorithms.batches import Batch, batches

GROUP_ESTIMATORS = [grpo, dr_grpo, rloo]
Estimate = tuple[torch.Tensor, torch.Tensor]


def one_token(scores: list[float], group_ids: list[int], tokens: list[int] | None = None) -> tuple[torch.Tensor, ...]:
    """Rewards, mask and ids of samples that carry their score on the last of two tokens."""
    rewards = torch.zeros(len(scores), 2, dtype=torch.float64)
    rewards[:, 1] = torch.tensor(scores, dtype=torch.float64)
    counts = torch.tensor([2] * len(scores) if tokens is None else tokens)
    mask = torch.arange(2).unsqueeze(0) >= 2 - counts.unsqueeze(1)
    return rewards, mask, torch.tensor(group_ids)


def test_grpo_by_hand() -> None:
    rewards, mask, ids = one_token([1.0, 0.0, 0.0, 1.0, 5.0, 7.0], [4, 4, 4, 4, 9, 9])
    advantages, returns = grpo(rewards, mask, ids, epsilon=0.0)
    half = math.sqrt(1 / 3)  # unbiased std of 1, 0, 0, 1
    expected = torch.tensor([0.5 / half, -0.5 / half, -0.5 / half, 0.5 / half, -1 / math.sqrt(2), 1 / math.sqrt(2)])
    torch.testing.assert_close(advantages, expected.double().unsqueeze(1).expand(6, 2), rtol=1e-6, atol=0)
    assert torch.equal(advantages, returns)


def test_rloo_by_hand() -> None:
    advantages, _ = rloo(*one_token([1.0, 2.0, 6.0], [0, 0, 0]))
    assert advantages[:, 0].tolist() == [1.0 - 4.0, 2.0 - 3.5, 6.0 - 1.5]


def test_gae_by_hand() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]).double(), torch.tensor([[0.5, 7.0, 0.25]]).double()
    mask = torch.tensor([[True, False, True]])
    _, returns = gae(rewards, mask, values, gamma=0.5, lam=0.5)
    last = 1.0 - 0.25
    first = 0.0 + 0.5 * 0.25 - 0.5 + 0.25 * last
    assert returns.tolist() == [[first + 0.5, 0.0, last + 0.25]]


def test_gae_with_lambda_one_returns_the_reward_to_go() -> None:
    rewards = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.0, 0.0]]).double()
    mask = torch.tensor([[True, True, True], [True, False, False]])
    _, returns = gae(rewards, mask, torch.randn(2, 3).double(), gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[6.0, 5.0, 3.0], [0.5, 0.0, 0.0]]).double())


def test_reinforce_plus_plus_by_hand() -> None:
    rewards, mask = torch.tensor([[1.0], [3.0]]).double(), torch.ones(2, 1, dtype=torch.bool)
    advantages, returns = reinforce_plus_plus(rewards, mask)
    assert returns.tolist() == [[1.0], [3.0]]
    torch.testing.assert_close(advantages, torch.tensor([[-1.0], [1.0]]).double() / math.sqrt(2))


def test_whitening_one_token_is_refused() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    with pytest.raises(ContractError, match="at least two"):
        reinforce_plus_plus(torch.ones(2, 2), mask)


def test_a_partition_without_trained_tokens_has_no_advantage() -> None:
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    for estimator in (reinforce_plus_plus, gae):
        columns = [torch.ones(2, 2), nothing] + ([torch.ones(2, 2)] if estimator is gae else [])
        assert not any(part.any() for part in estimator(*columns))


def test_the_planner_can_read_what_estimators_need() -> None:
    assert ADVANTAGES["grpo"].signature.columns == ("token_rewards", "response_mask", "group_ids")
    assert ADVANTAGES["grpo"].signature.parameters["norm_adv_by_std"].default is True
    assert "values" in ADVANTAGES["gae"].signature.columns
    assert ADVANTAGES["gae"].scope is Scope.PARTITION


# -- invariants --


@settings(max_examples=30, deadline=None)
@given(batch=batches(), shift=st.floats(-1e4, 1e4), scale=st.floats(0.1, 10))
def test_group_estimators_ignore_a_common_reward_offset(batch: Batch, shift: float, scale: float) -> None:
    first = batch.mask & (batch.mask.cumsum(-1) == 1)
    moved = batch.token_rewards * scale + shift * first
    for estimator, factor in ((dr_grpo, scale), (rloo, scale)):
        before, _ = estimator(batch.token_rewards, batch.mask, batch.group_ids)
        after, _ = estimator(moved, batch.mask, batch.group_ids)
        torch.testing.assert_close(after, before * factor, rtol=1e-6, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(batch=batches())
def test_grpo_equals_a_plain_loop(batch: Batch) -> None:
    want = torch.zeros_like(batch.token_rewards)
    scores = torch.where(batch.mask, batch.token_rewards, 0.0).sum(-1)
    for group in batch.group_ids.unique():
        rows = [i for i in range(len(scores)) if batch.group_ids[i] == group and batch.mask[i].any()]
        if len(rows) > 1:
            members = scores[rows]
            for i in rows:
                want[i] = (scores[i] - members.mean()) / (members.std() + 1e-6) * batch.mask[i]
    torch.testing.assert_close(grpo(batch.token_rewards, batch.mask, batch.group_ids)[0], want, rtol=1e-9, atol=1e-9)


# -- cases; those of every estimator are in ``test_every_estimator`` --


@pytest.mark.parametrize("estimator", [reinforce_plus_plus, gae])
def test_b12_a_failed_reward_leaves_the_rest_of_the_partition_alone(estimator: Callable[..., Estimate]) -> None:
    rewards, mask, _ = one_token([1.0, math.nan, 3.0, 8.0], [0] * 4)
    values = [torch.randn(4, 2).double()] if estimator is gae else []
    advantages, returns = estimator(rewards, mask, *values)
    rest = torch.tensor([0, 2, 3])
    alone, _ = estimator(rewards[rest], mask[rest], *[v[rest] for v in values])
    torch.testing.assert_close(advantages[rest], alone)
    assert not advantages[1].any()
    assert bool(returns.isfinite().all())


def test_b13_an_observation_between_tokens_does_not_cut_the_return() -> None:
    rewards, mask = (
        torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]).double(),
        torch.tensor([[1, 0, 1], [1, 1, 0]]).bool(),
    )
    _, returns = reinforce_plus_plus(rewards, mask, gamma=0.5)
    assert returns[0].tolist() == [0.5, 0.0, 1.0]
    _, returns = gae(rewards, mask, torch.zeros(2, 3).double(), gamma=0.5, lam=1.0)
    assert returns[0].tolist() == [0.5, 0.0, 1.0]


def test_group_ids_must_be_one_per_sample() -> None:
    rewards, mask, _ = one_token([1.0, 2.0], [0, 0])
    with pytest.raises(ContractError, match="one id per sample"):
        grpo(rewards, mask, torch.tensor([0, 0, 1]))


def test_a_single_token_is_0_where_others_failed_and_refused_where_it_was_sampled_alone() -> None:
    rewards, mask = torch.tensor([[1.0], [3.0]]), torch.ones(2, 1, dtype=torch.bool)
    advantages, _ = ADVANTAGES["reinforce_plus_plus"].target(rewards, mask, torch.tensor([True, False]))
    assert not advantages.any()
    with pytest.raises(ContractError, match="1 selected"):
        ADVANTAGES["reinforce_plus_plus"].target(rewards[:1], mask[:1])
