"""The further estimators: one hand-computed case each, and their errors. Invariants are in ``test_advantages``."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithms.advantage import grpo
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
    advantages, returns = optimal_token_baseline(rewards, mask, GROUP[:2], logprobs, squares, epsilon=0.0)
    first, second = 1 - 2 * 0.5 + 0.5, 1 - 2 * 0.25 + 0.5
    baseline = (2.0 * first + 1.0 * second) / (first + second)
    assert returns.tolist() == [[2.0, 2.0], [1.0, 0.0]]
    expected = torch.tensor([[2.0 - baseline, 2.0], [1.0 - baseline, 0.0]]).double()
    torch.testing.assert_close(advantages, expected)
    doubled = torch.full((2, 2), 2.0).double()
    weighted, _ = optimal_token_baseline(rewards, mask, GROUP[:2], logprobs, squares, doubled, epsilon=0.0)
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
