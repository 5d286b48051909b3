"""One case by hand at each place where a formula and its likely misreading part.

A mask too wide, a side for the other, a bound reached or not, a mean by another count, a digit lost: elsewhere the two
agree, which is why random batches rarely tell them apart.
"""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithms.advantage import gae, reinforce_plus_plus
from tandem.algorithms.baselines import gdpo, gpg, optimal_token_baseline, reinforce_plus_plus_baseline
from tandem.algorithms.behaviour_losses import decoupled_ppo, m2po
from tandem.algorithms.masked import masked_whiten
from tandem.algorithms.policy_loss import ppo_clip
from tandem.algorithms.preference_losses import orpo
from tandem.algorithms.ratio_losses import dppo_kl, dppo_tv
from tandem.algorithms.reduce import loss_numerator
from tandem.algorithms.rollout_correction import Rejection, correct_rollout
from tandem.algorithms.sequence_losses import clip_cov, geo_mean, gspo


def row(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype)


def column(*values: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers of one token with these rewards."""
    rewards = torch.tensor(values, dtype=torch.float64).unsqueeze(-1)
    return rewards, torch.ones_like(rewards, dtype=torch.bool)


TWO_AND_ONE_ALONE = torch.tensor([0, 0, 1])
H = math.sqrt(0.5)


# -- who counts --


def test_the_mean_of_a_row_stands_whatever_its_padding_holds() -> None:
    terms = torch.tensor([[1.0, math.nan], [3.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, True]])
    total = loss_numerator(terms, mask, "seq-mean-token-mean")
    assert total.item() == 1.0 + 4.0
    (slopes,) = torch.autograd.grad(total, terms)
    assert slopes.tolist() == [[1.0, 0.0], [0.5, 0.5]]


def test_gpg_counts_a_sample_without_a_peer_in_both_of_its_counts() -> None:
    advantages, _ = gpg(*column(0.0, 2.0, 3.0), TWO_AND_ONE_ALONE)
    assert advantages.flatten().tolist() == [-1.5, 1.5, 0.0]  # times 3 counted / 2 that score; of those compared 2 / 1
    without, _ = gpg(*column(0.0, 2.0, 0.0), TWO_AND_ONE_ALONE)
    assert without.flatten().tolist() == [-3.0, 3.0, 0.0]  # 3 / 1


@pytest.mark.parametrize("alone", [0.0, 2.0, 70.0])
def test_a_sample_without_a_peer_stays_out_of_the_whitening(alone: float) -> None:
    """Two tokens with deviations -1 and 1 have the spread sqrt(2); with the 0 of a third it would be 1."""
    rewards, mask = column(0.0, 2.0, alone)
    advantages, _ = reinforce_plus_plus_baseline(rewards, mask, TWO_AND_ONE_ALONE)
    assert advantages.flatten().tolist() == pytest.approx([-H, H, 0.0])
    parts = torch.cat([rewards, rewards], dim=-1)
    advantages, _ = gdpo(rewards, mask, TWO_AND_ONE_ALONE, parts)
    assert advantages.flatten().tolist() == pytest.approx([-H, H, 0.0])


def test_a_sample_without_a_peer_keeps_its_returns() -> None:
    rewards, mask = column(0.0, 2.0, 3.0)
    level = torch.full_like(rewards, 0.5)
    advantages, returns = optimal_token_baseline(rewards, mask, TWO_AND_ONE_ALONE, level.log(), level)
    assert returns.flatten().tolist() == [0.0, 2.0, 3.0]
    assert advantages.flatten().tolist() == [-1.0, 1.0, 0.0]


def test_a_failed_sample_teaches_the_critic_its_own_values() -> None:
    rewards, mask = torch.tensor([[1.0, 2.0], [3.0, 5.0]]).double(), torch.ones(2, 2, dtype=torch.bool)
    values = torch.tensor([[0.5, 0.25], [7.0, 9.0]]).double()
    advantages, returns = gae(rewards, mask, values, torch.tensor([True, False]))
    assert returns.tolist() == [[3.0, 2.0], [7.0, 9.0]]
    assert advantages[1].tolist() == [0.0, 0.0] and bool(advantages[0].any())


# -- which side --


@pytest.mark.parametrize("loss", [dppo_kl, dppo_tv])
@pytest.mark.parametrize(
    ("advantage", "to", "low", "high", "moves"),
    [
        (-1.0, 0.3, 0.5, 0.001, True),  # fell, and may fall so far
        (-1.0, 0.3, 0.001, 0.5, False),  # fell too far, though it might have risen as far
        (1.0, 0.7, 0.001, 0.5, True),
        (1.0, 0.7, 0.5, 0.001, False),
    ],
)
def test_dppo_has_a_bound_of_its_own_on_each_side(
    loss: object, advantage: float, to: float, low: float, high: float, moves: bool
) -> None:
    assert callable(loss)
    logprobs = row(math.log(to)).requires_grad_()
    mask = torch.ones(1, 1, dtype=torch.bool)
    result = loss(logprobs, row(math.log(0.5)), row(advantage), mask, clip_ratio_low=low, clip_ratio_high=high)
    (slope,) = torch.autograd.grad(result.per_token.sum(), logprobs)
    assert slope.item() == (pytest.approx(-advantage * to / 0.5) if moves else 0.0)
    assert result.metrics["clipfrac"].mean == (0.0 if moves else 1.0)


@pytest.mark.parametrize(
    ("advantage", "before", "to", "bound"), [(1.0, 0.5, 1.0, 0.5), (-1.0, 1.0, 0.5, 0.5), (1.0, 0.25, 0.5, 0.25)]
)
def test_dppo_lets_a_probability_move_up_to_its_bound(advantage: float, before: float, to: float, bound: float) -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    for width, moves in ((bound, True), (bound - 1e-6, False)):
        result = dppo_tv(row(math.log(to)), row(math.log(before)), row(advantage), mask, clip_ratio=width)
        assert result.metrics["clipfrac"].mean == (0.0 if moves else 1.0)


@pytest.mark.parametrize(
    ("advantage", "before", "to", "distance"),
    [
        (-1.0, 1.0, 0.5, math.log(2)),  # the other outcome was impossible and adds nothing
        (1.0, 0.5, 1.0, 0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-8)),  # it is now: finite all the same
        (1.0, 0.5, 0.75, 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)),
        (-1.0, 0.5, 0.25, 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)),
    ],
)
def test_dppo_lets_a_token_move_up_to_its_divergence(
    advantage: float, before: float, to: float, distance: float
) -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    for bound, moves in ((distance + 1e-6, True), (distance - 1e-6, False)):
        result = dppo_kl(row(math.log(to)), row(math.log(before)), row(advantage), mask, clip_ratio=bound)
        assert result.metrics["clipfrac"].mean == (0.0 if moves else 1.0)


@pytest.mark.parametrize(
    ("before", "to", "high", "bounded"),
    [(0.1, 0.5, 0.6, 1.0), (0.1, 0.5, 0.2, 0.0), (0.4, 0.5, 0.6, 0.0), (0.4, 0.5, 0.05, 0.0), (0.125, 0.25, 0.6, 0.0)],
)
def test_dppo_tells_of_the_tokens_inside_whose_weight_is_bounded(
    before: float, to: float, high: float, bounded: float
) -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    result = dppo_tv(
        row(math.log(to)), row(math.log(before)), row(1), mask, clip_ratio_high=high, clip_ratio_c=math.exp(math.log(2))
    )
    assert result.metrics["clipfrac_lower"].mean == bounded


def test_a_quantile_keeps_what_drifted_least_in_either_direction() -> None:
    """Log-ratios -3, -1, 0.5, 2: the half that drifted least is the middle one, not the half of smallest ratio."""
    old, mask = row(-3.0, -1.0, 0.5, 2.0), torch.ones(1, 4, dtype=torch.bool)
    for statistic, kept in (("token_k1", [False, True, True, False]), ("token_k2", [False, True, True, False])):
        result = correct_rollout(old, row(0, 0, 0, 0), mask, rejections=[Rejection(statistic, quantile=0.5)])
        assert result.response_mask[0].tolist() == kept


def test_a_band_is_of_old_over_rollout() -> None:
    """Ratios 0.6 and 1.5 under the band 0.5 to 1.2; of the inverse ratios, 1.67 and 0.67, the other one would stay."""
    old, mask = row(math.log(0.6), math.log(1.5)), torch.ones(1, 2, dtype=torch.bool)
    result = correct_rollout(old, row(0, 0), mask, rejections=[Rejection("token_k1", 1.2, low=0.5)])
    assert result.response_mask[0].tolist() == [True, False]


# -- how many --


def silenced(logprobs: torch.Tensor, advantages: torch.Tensor, threshold: float) -> list[bool]:
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    result = m2po(logprobs, torch.zeros_like(logprobs), advantages, mask, m2_threshold=threshold)
    found: list[bool] = ((result.per_token == 0) & (advantages != 0)).flatten().tolist()
    return found


def test_m2po_counts_equal_squares_as_often_as_they_occur() -> None:
    """Squares 0.01 three times and 0.09: their mean is 0.03, of the two values counted once each it would be 0.05."""
    logprobs, advantages = row(0.1, 0.1, 0.1, 0.3), row(1, 1, 1, 1)
    assert silenced(logprobs, advantages, 0.04) == [False, False, False, False]
    assert silenced(logprobs, advantages, 0.029) == [False, False, False, True]


def test_m2po_leaves_tokens_that_go_nowhere_out_of_its_mean() -> None:
    """Of log-ratios 0, 0, 0 and 0.3 (and an advantage of 0) only the last leaves: the mean is 0.09, not 0.0225."""
    logprobs, advantages = row(0.0, 0.0, 0.5, 0.3), row(1, 1, 0, 1)
    assert silenced(logprobs, advantages, 0.08) == [False, False, False, True]
    assert silenced(logprobs, advantages, 0.1) == [False, False, False, False]


def test_clip_cov_silences_a_fraction_of_the_tokens_not_of_the_candidates() -> None:
    """Two of eight tokens have a covariance above 1: a quarter of the tokens is both, of the candidates none whole."""
    logprobs = row(-0.1, -3.0, *([-1.5] * 6)).requires_grad_()
    advantages = row(2.0, -2.0, *([0.1, -0.1] * 3))
    mask = torch.ones(1, 8, dtype=torch.bool)
    result = clip_cov(
        logprobs, logprobs.detach(), advantages, mask, clip_cov_ratio=0.25, clip_cov_lb=1.0, clip_cov_ub=9.0
    )
    assert (result.per_token == 0)[0].tolist() == [True, True, *([False] * 6)]
    assert result.metrics["clipfrac"].mean == 0.25


# -- at a bound --


def test_gspo_bounds_the_ratio_of_an_answer_at_e_to_the_10() -> None:
    for drift, ratio, slope in ((9.0, math.exp(9), 2 * math.exp(9)), (15.0, math.exp(10), 0.0)):
        logprobs = row(drift, drift).requires_grad_()
        result = gspo(logprobs, row(0, 0), row(-1, -1), torch.ones(1, 2, dtype=torch.bool))
        assert result.per_token[0].tolist() == pytest.approx([ratio, ratio])
        (slopes,) = torch.autograd.grad(result.per_token.sum(), logprobs)
        assert slopes.sum().item() == pytest.approx(slope)


def test_decoupled_ppo_keeps_a_weight_at_its_cap() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    result = decoupled_ppo(row(0, 0), row(0, 0.1), row(0, 0), row(1, 1), mask, behaviour_cap=1.0)
    assert result.per_token[0].tolist() == [-1.0, 0.0]
    assert result.metrics["behaviour_dropped"].mean == 0.5


# -- which number --


def test_orpo_tells_a_likelihood_loss_that_falls_as_answers_grow_likelier() -> None:
    preferred, ids, mask = torch.tensor([True, False]), torch.tensor([4, 4]), torch.ones(2, 2, dtype=torch.bool)
    result = orpo(torch.tensor([[-1.0, -3.0], [-5.0, -5.0]]).double(), mask, preferred, ids)
    assert result.metrics["preference/nll"].mean == 2.0


def test_whitening_keeps_the_digits_beside_a_large_offset() -> None:
    """1e4 and up in steps of 2^-8, as float32 holds them: a mean or a square in float32 loses what they differ by."""
    steps = torch.arange(64, dtype=torch.float64) / 256
    white = masked_whiten((1e4 + steps).float().reshape(8, 8), torch.ones(8, 8, dtype=torch.bool))
    spread = math.sqrt(float(steps.var()) + 1e-8)
    expected = ((steps - steps.mean()) / spread).float().reshape(8, 8)
    torch.testing.assert_close(white, expected, rtol=1e-6, atol=1e-6)
    rewards, mask = (1e4 + steps).float().reshape(64, 1), torch.ones(64, 1, dtype=torch.bool)
    for advantages in (
        reinforce_plus_plus(rewards, mask)[0],
        gae(rewards, mask, torch.zeros_like(rewards))[0],
        reinforce_plus_plus_baseline(rewards, mask, torch.zeros(64, dtype=torch.int64))[0],
    ):
        torch.testing.assert_close(advantages, expected.reshape(64, 1), rtol=1e-6, atol=1e-6)


def test_the_epsilon_of_whitening_is_under_the_root() -> None:
    """Variance 5e-9: beside 1e-8 under the root the values shrink to sqrt(1/3) of their normal size."""
    white = masked_whiten(row(0.0, 1e-4), torch.ones(1, 2, dtype=torch.bool))
    assert white[0].tolist() == pytest.approx([-H / math.sqrt(3), H / math.sqrt(3)], rel=1e-9)


# -- how many are clipped --


@pytest.mark.parametrize("loss", [ppo_clip, gspo])
@pytest.mark.parametrize(
    ("drift", "advantage", "clipped"),
    [(0.1, 1.0, 0.0), (0.1, -1.0, 0.0), (0.5, 1.0, 1.0), (0.5, -1.0, 0.0), (-0.5, -1.0, 1.0), (-0.5, 1.0, 0.0)],
)
def test_only_where_the_clip_takes_the_gradient_a_token_counts_as_clipped(
    loss: object, drift: float, advantage: float, clipped: float
) -> None:
    assert callable(loss)
    result = loss(row(drift, drift), row(0, 0), row(advantage, advantage), torch.ones(1, 2, dtype=torch.bool))
    assert result.metrics["clipfrac"].mean == clipped


@pytest.mark.parametrize(
    ("drift", "advantage", "upper", "lower"),
    [
        (0.5, 1, 1, 0),
        (0.5, -1, 0, 1),
        (-0.5, 1, 1, 0),
        (-0.5, -1, 0, 1),
        (0.1, 1, 0, 0),
        (0.1, -1, 0, 0),
        (0.5, 0, 0, 0),
    ],
)
def test_geo_mean_tells_of_the_tokens_outside_by_the_sign_of_their_advantage(
    drift: float, advantage: float, upper: float, lower: float
) -> None:
    result = geo_mean(row(drift), row(0), row(advantage), torch.ones(1, 1, dtype=torch.bool))
    assert (result.metrics["clipfrac"].mean, result.metrics["clipfrac_lower"].mean) == (upper, lower)


def test_clip_cov_draws_only_tokens_that_the_clip_left_their_gradient() -> None:
    """Covariances 0.5 and 0.5; the first ratio rose beyond its clip, so that only the second can be silenced."""
    logprobs, old = row(-1.0, -2.0).requires_grad_(), row(-2.0, -2.0)
    result = clip_cov(
        logprobs, old, row(1.0, -1.0), torch.ones(1, 2, dtype=torch.bool), clip_cov_ratio=1.0, clip_cov_lb=0.1
    )
    assert result.metrics["clipfrac"].mean == 0.5
    assert result.per_token[0].tolist() == pytest.approx([-1.2, 0.0])
