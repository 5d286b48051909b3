"""The further estimators: one hand-computed case each, and their errors. Invariants are in ``test_advantages``."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tandem.algorithms.advantage import Advantages, grpo
from tandem.algorithms.baselines import (
    gdpo,
    gpg,
    grpo_passk,
    opo,
    optimal_token_baseline,
    reinforce_plus_plus_baseline,
    remax,
    tir_optimal_token_baseline,
)
from tandem.base.errors import ContractError

GROUP = torch.zeros(3, dtype=torch.int64)


def scored(*scores: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per sample, with its score as the reward."""
    rewards = torch.tensor(scores, dtype=torch.float64).unsqueeze(1)
    return rewards, torch.ones_like(rewards, dtype=torch.bool)


def test_passk_rewards_the_lead_of_the_best() -> None:
    advantages, _ = grpo_passk(*scored(1.0, 5.0, 2.0), GROUP, norm_adv_by_std=False)
    assert advantages.flatten().tolist() == [0.0, 3.0, 0.0]
    std = math.sqrt(((1 - 8 / 3) ** 2 + (5 - 8 / 3) ** 2 + (2 - 8 / 3) ** 2) / 2)
    normalised, _ = grpo_passk(*scored(1.0, 5.0, 2.0), GROUP, epsilon=0.0)
    assert normalised[1].item() == pytest.approx(3.0 / std)
    tied, _ = grpo_passk(*scored(5.0, 5.0, 2.0), GROUP)
    assert not tied.any()


def test_reinforce_plus_plus_baseline_whitens_deviations() -> None:
    advantages, _ = reinforce_plus_plus_baseline(*scored(1.0, 2.0, 6.0), GROUP)
    deviations = torch.tensor([-2.0, -1.0, 3.0]).double()
    torch.testing.assert_close(advantages.flatten(), deviations / deviations.std(), rtol=1e-6, atol=0)


def test_gdpo_normalises_components_before_adding_them() -> None:
    rewards, mask = scored(0.0, 0.0, 0.0)
    components = torch.tensor([[1.0, 500.0], [2.0, 100.0], [6.0, 300.0]]).double()
    advantages, _ = gdpo(rewards, mask, GROUP, components, weights=[1.0, 0.5])
    parts = [grpo(components[:, k : k + 1], mask, GROUP)[0].flatten() for k in (0, 1)]
    total = parts[0] + 0.5 * parts[1]
    torch.testing.assert_close(advantages.flatten(), (total - total.mean()) / total.std(), rtol=1e-6, atol=1e-9)
    with pytest.raises(ContractError, match="1 weights for 2"):
        gdpo(rewards, mask, GROUP, components, weights=[1.0])


def test_remax_subtracts_the_greedy_score() -> None:
    rewards = torch.tensor([[1.0, 2.0, 9.0]]).double()
    mask = torch.tensor([[True, True, False]])
    advantages, returns = remax(rewards, mask, torch.tensor([0.5]))
    assert returns.tolist() == [[3.0, 2.0, 0.0]]
    assert advantages.tolist() == [[2.5, 1.5, 0.0]]


def test_opo_weighs_scores_by_length() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0], [4.0, 0.0, 0.0]]).double()
    mask = torch.tensor([[True, True, True], [True, False, False]])
    advantages, _ = opo(rewards, mask, GROUP[:2])
    baseline = (3 * 1.0 + 1 * 4.0) / 4
    assert advantages[0].tolist() == [1.0 - baseline] * 3
    assert advantages[1].tolist() == [4.0 - baseline, 0.0, 0.0]


def test_gpg_scales_by_the_share_of_samples_that_score() -> None:
    advantages, _ = gpg(*scored(0.0, 0.0, 3.0), GROUP, f_norm=2.0)
    assert advantages.flatten().tolist() == [-1.0 * 3 / 2, -1.0 * 3 / 2, 2.0 * 3 / 2]
    with pytest.raises(ContractError, match="f_norm"):
        gpg(*scored(0.0, 1.0, 3.0), GROUP, f_norm=0.0)


def test_optimal_token_baseline_by_hand() -> None:
    rewards = torch.tensor([[0.0, 2.0], [1.0, 0.0]]).double()
    mask = torch.tensor([[True, True], [True, False]])
    logprobs = torch.tensor([[0.5, 0.5], [0.25, 0.5]]).double().log()
    squares = torch.full((2, 2), 0.5).double()
    advantages, returns = optimal_token_baseline(rewards, mask, GROUP[:2], logprobs, squares)
    first, second = 1 - 2 * 0.5 + 0.5, 1 - 2 * 0.25 + 0.5
    baseline = (2.0 * first + 1.0 * second) / (first + second)
    assert returns.tolist() == [[2.0, 2.0], [1.0, 0.0]]
    expected = torch.tensor([[2.0 - baseline, 2.0], [1.0 - baseline, 0.0]]).double()
    torch.testing.assert_close(advantages, expected)
    doubled = torch.full((2, 2), 2.0).double()
    weighted, _ = optimal_token_baseline(rewards, mask, GROUP[:2], logprobs, squares, doubled)
    torch.testing.assert_close(weighted, expected)  # a common importance weight cancels


def test_the_multi_turn_form_compares_trained_tokens_of_equal_rank() -> None:
    """Tool results of any length between the same tokens change nothing."""
    random = torch.Generator().manual_seed(0)
    rewards, logprobs, squares = (torch.rand(3, 4, generator=random, dtype=torch.float64) for _ in range(3))
    logprobs = logprobs.log()
    full = torch.ones(3, 4, dtype=torch.bool)
    plain, _ = optimal_token_baseline(rewards, full, GROUP, logprobs, squares)
    places = torch.tensor([[0, 1, 4, 6], [0, 3, 4, 5], [1, 2, 3, 6]])
    wide = [
        torch.full((3, 7), 9.0, dtype=torch.float64).scatter(1, places, part) for part in (rewards, logprobs, squares)
    ]
    mask = torch.zeros(3, 7, dtype=torch.bool).scatter(1, places, full)
    spread, _ = tir_optimal_token_baseline(wide[0], mask, GROUP, wide[1], wide[2])
    torch.testing.assert_close(spread.gather(1, places), plain)
    assert not spread[~mask].any()


def likely(p: float, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of tokens that are all of probability ``p``, and the sums of squares, the rest being one token."""
    squares = p**2 + (1 - p) ** 2
    return torch.full_like(like, p, dtype=torch.float32).log(), torch.full_like(like, squares, dtype=torch.float32)


@pytest.mark.parametrize("weights", [None, 0.0, 1e-6], ids=["unweighted", "weights 0", "tiny weights"])
@pytest.mark.parametrize("p", [1.0, 0.99999, 0.999, 0.5, 1e-6])
@pytest.mark.parametrize("reward", [1.0, 0.1, -3.0, 1e4])
@pytest.mark.parametrize("estimator", [optimal_token_baseline, tir_optimal_token_baseline])
def test_a_flat_group_is_exactly_still_however_sure_its_tokens_are(
    estimator: Callable[..., Advantages], reward: float, p: float, weights: float | None
) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()
    for dtype in (torch.float32, torch.float64):
        rewards = torch.zeros(3, 4, dtype=dtype)
        rewards[torch.arange(3), mask.sum(-1) - 1] = reward
        logprobs, squares = likely(p, rewards)
        given = None if weights is None else torch.full_like(logprobs, weights)
        advantages, returns = estimator(rewards, mask, GROUP, logprobs, squares, given)
        assert not advantages.any()
        assert returns[mask].tolist() == pytest.approx([reward] * int(mask.sum()))


@pytest.mark.parametrize("p", [1.0, 0.99999])
def test_a_baseline_of_certain_tokens_lies_between_the_returns(p: float) -> None:
    """Their energy is 0 or rounding: the baseline is still a mean of the returns, and the better sample leads."""
    rewards, mask = scored(1.0, 0.0, 0.0, 1.0)
    group, (logprobs, squares) = torch.zeros(4, dtype=torch.int64), likely(p, rewards)
    noise = torch.tensor([[0.0], [-1.2e-7], [6e-8], [0.0]])
    advantages, _ = optimal_token_baseline(rewards, mask, group, logprobs, squares + noise)
    assert bool((advantages[[0, 3]] >= 0).all()) and bool((advantages[[1, 2]] <= 0).all())
    assert bool((advantages.abs() <= 1).all()) and bool((advantages[0] - advantages[1] == 1).all())
    if p == 1.0:
        still, _ = optimal_token_baseline(rewards, mask, group, logprobs, torch.ones_like(squares))
        assert still.flatten().tolist() == [0.5, -0.5, -0.5, 0.5]
