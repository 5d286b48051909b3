"""Cases by hand at bounds that are reached exactly, and where digits or a weight of a column would be lost."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithms.advantage import reward_to_go
from tandem.algorithms.baselines import optimal_token_baseline
from tandem.algorithms.behaviour_losses import m2po
from tandem.algorithms.distillation import reverse_kl
from tandem.algorithms.ratio_losses import dppo_tv
from tandem.algorithms.rollout_correction import mismatch_metrics
from tandem.algorithms.sequence_losses import clip_cov


def row(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype)


def test_the_weight_of_a_token_in_its_baseline_is_the_square_of_its_importance() -> None:
    """Rewards 4 and 0 of equal energy with importance 3 and 1: the baseline is 4 · 9 / (9 + 1), not 4 · 3 / 4 or 2."""
    rewards, mask = torch.tensor([[4.0], [0.0]]).double(), torch.ones(2, 1, dtype=torch.bool)
    half, importance = torch.full_like(rewards, 0.5), torch.tensor([[3.0], [1.0]]).double()
    ids = torch.tensor([0, 0])
    advantages, _ = optimal_token_baseline(rewards, mask, ids, half.log(), half, importance)
    assert advantages.flatten().tolist() == pytest.approx([0.4, -3.6])
    advantages, _ = optimal_token_baseline(rewards, mask, ids, half.log(), half)
    assert advantages.flatten().tolist() == pytest.approx([2.0, -2.0])


def test_m2po_trusts_a_mean_that_is_the_threshold_itself() -> None:
    """Log-ratios 0.5 and 0.5: the mean of the squares is 0.25 to the bit."""
    logprobs, mask = row(0.5, 0.5), torch.ones(1, 2, dtype=torch.bool)
    at = m2po(logprobs, torch.zeros_like(logprobs), row(1, 1), mask, m2_threshold=0.25)
    below = m2po(logprobs, torch.zeros_like(logprobs), row(1, 1), mask, m2_threshold=0.25 - 2**-20)
    assert (at.metrics["clipfrac"].mean, below.metrics["clipfrac"].mean) == (0.0, 1.0)


def test_a_reward_to_go_is_summed_in_float64() -> None:
    """2^24 and 1, which float32 can't add, then the way back: in float32 the 1 would be gone."""
    found = reward_to_go(row(-(2.0**24), 2.0**24, 1.0, dtype=torch.float32), torch.ones(1, 3, dtype=torch.bool), 1.0)
    assert found.dtype == torch.float64 and found[0].tolist() == [1.0, 2.0**24 + 1, 1.0]


def test_a_mismatch_too_small_for_float32_is_measured() -> None:
    """exp(d) - d - 1 of d = 2^-13 is 2^-27; in float32 the difference of numbers near 1 has no such digit."""
    found = mismatch_metrics(row(2.0**-13, dtype=torch.float32), torch.ones(1, 1, dtype=torch.bool))
    assert found["mismatch_k3"] == pytest.approx(2.0**-27, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("discount", [0.0, 0.5])
def test_the_advantages_of_a_distillation_have_the_dtype_of_its_log_probs(dtype: torch.dtype, discount: float) -> None:
    terms = reverse_kl(
        row(-1, -1, dtype=dtype), row(-0.5, -2, dtype=dtype), torch.ones(1, 2, dtype=torch.bool), discount=discount
    )
    assert terms.advantages.dtype == dtype
    assert terms.advantages[0].tolist() == [0.5 - discount, -1.0]


def test_a_ratio_at_its_bound_is_not_told_as_bounded() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    for bound, told in ((1.0, 0.0), (1.0 - 2**-20, 1.0)):
        result = dppo_tv(row(math.log(0.5)), row(math.log(0.5)), row(1), mask, clip_ratio_c=bound)
        assert result.metrics["clipfrac_lower"].mean == told


@pytest.mark.parametrize(("low", "high", "silenced"), [(0.5, 1.0, 0.0), (1.0, 2.0, 0.0), (0.5, 1.0 + 2**-20, 1.0)])
def test_a_covariance_at_either_bound_is_left_its_gradient(low: float, high: float, silenced: float) -> None:
    """Advantages and log-probs 1 above and below their means: both covariances are 1."""
    logprobs = row(-1.0, -3.0).requires_grad_()
    result = clip_cov(
        logprobs,
        logprobs.detach(),
        row(1.0, -1.0),
        torch.ones(1, 2, dtype=torch.bool),
        clip_cov_ratio=1.0,
        clip_cov_lb=low,
        clip_cov_ub=high,
    )
    assert result.metrics["clipfrac"].mean == silenced
