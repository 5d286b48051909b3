"""The further losses: hand-computed values and errors.

Invariants of every registered loss are in ``test_losses``.
"""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithms import POLICY_LOSSES
from tandem.algorithms.policy_loss import PolicyLoss
from tandem.algorithms.ratio_losses import cispo, dppo_kl, dppo_tv, dro, gpg, sapo
from tandem.algorithms.sequence_losses import clip_cov, geo_mean, gspo, kl_cov
from tandem.algorithms.value_loss import value_loss
from tandem.base.errors import ContractError
from tandem.base.registry import Scope

ONE = torch.ones(1, 1, dtype=torch.bool)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def slope(result: PolicyLoss, logprobs: torch.Tensor) -> list[float]:
    """Gradient of the sum of the terms."""
    gradient: list[float] = torch.autograd.grad(result.per_token.sum(), logprobs)[0].flatten().tolist()
    return gradient


@pytest.mark.parametrize(("ratio", "weight"), [(1.1, 1.1), (1.5, 1.2), (0.5, 0.8)])
def test_cispo_clips_the_weight_and_keeps_the_gradient(ratio: float, weight: float) -> None:
    logprobs = scalar(-0.7).requires_grad_()
    result = cispo(logprobs, scalar(-0.7 - math.log(ratio)), scalar(2.0), ONE)
    assert slope(result, logprobs) == pytest.approx([-2.0 * weight])
    assert result.per_token.item() == pytest.approx(2.0 * weight * 0.7)


def test_gpg_is_the_plain_policy_gradient() -> None:
    logprobs = scalar(-0.7).requires_grad_()
    assert slope(gpg(logprobs, scalar(3.0), ONE), logprobs) == [-3.0]


@pytest.mark.parametrize("loss", [dppo_tv, dppo_kl])
def test_dppo_stops_only_the_way_out_of_the_region(loss: object) -> None:
    assert callable(loss)
    for advantage, moves in ((1.0, False), (-1.0, True)):  # the probability rose from 0.1 to 0.9
        logprobs = scalar(math.log(0.9)).requires_grad_()
        result = loss(logprobs, scalar(math.log(0.1)), scalar(advantage), ONE)
        assert slope(result, logprobs) == pytest.approx([3.0 if moves else 0.0])  # ratio 9, bounded by 3
        assert result.metrics["clipfrac"].mean == (0.0 if moves else 1.0)
    rare = scalar(math.log(0.004)).requires_grad_()
    assert slope(loss(rare, scalar(math.log(0.002)), scalar(1.0), ONE), rare) == pytest.approx([-2.0])


def test_sapo_gates_softly() -> None:
    logprobs = scalar(math.log(2.0)).requires_grad_()
    result = sapo(logprobs, scalar(0.0), scalar(1.0), ONE, tau_pos=2.0)
    gate = 1 / (1 + math.exp(-2.0))
    assert result.per_token.item() == pytest.approx(-gate * 2)
    assert slope(result, logprobs) == pytest.approx([-4 * gate * (1 - gate) * 2])
    with pytest.raises(ContractError, match="tau_neg"):
        sapo(logprobs, scalar(0.0), scalar(1.0), ONE, tau_neg=0.0)


def test_dro_pulls_to_the_old_policy() -> None:
    logprobs = scalar(-0.5).requires_grad_()
    result = dro(logprobs, scalar(-1.0), scalar(2.0), ONE, dro_beta=0.3)
    assert result.per_token.item() == pytest.approx(1.0 + 0.15 * 0.25)
    assert slope(result, logprobs) == pytest.approx([-2.0 + 0.3 * 0.5])
    with pytest.raises(ContractError, match="dro_beta"):
        dro(logprobs, scalar(-1.0), scalar(2.0), ONE, dro_beta=0.0)


TWO = torch.ones(1, 2, dtype=torch.bool)


def test_gspo_uses_the_mean_log_ratio_of_the_sequence() -> None:
    logprobs = torch.tensor([[0.2, -0.1]], dtype=torch.float64, requires_grad=True)
    result = gspo(logprobs, torch.zeros(1, 2).double(), torch.tensor([[1.0, 2.0]]).double(), TWO)
    ratio = math.exp(0.05)
    assert result.per_token.flatten().tolist() == pytest.approx([-ratio, -2 * ratio])
    assert slope(result, logprobs) == pytest.approx([-ratio, -2 * ratio])


def test_geo_mean_by_hand() -> None:
    logprobs = torch.tensor([[0.5, -0.1]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0]]).double()
    result = geo_mean(logprobs, torch.zeros(1, 2).double(), advantages, TWO)
    expected = -math.exp((0.2 - 0.1) / 2)  # the first log-ratio is clipped to 0.2
    assert result.per_token.flatten().tolist() == pytest.approx([expected, expected])
    assert slope(result, logprobs) == pytest.approx([0.0, 2 * expected / 2])
    halved = geo_mean(logprobs, torch.zeros(1, 2).double(), advantages, TWO, torch.tensor([[0.25, 1.0]]).double())
    assert halved.per_token.flatten().tolist() == pytest.approx([expected / 2, expected / 2])


COVARIANT = torch.tensor([[1.0, -1.0, 0.2, -0.2]]).double()
FOUR = torch.ones(1, 4, dtype=torch.bool)


def test_clip_cov_silences_tokens_of_high_covariance() -> None:
    logprobs = torch.tensor([[-0.1, -3.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    result = clip_cov(
        logprobs, logprobs.detach(), COVARIANT, FOUR, clip_cov_ratio=1.0, clip_cov_lb=1.0, clip_cov_ub=9.0
    )
    assert slope(result, logprobs) == pytest.approx([0.0, 0.0, -0.2, 0.2])
    assert result.metrics["clipfrac"].mean == 0.5


def test_clip_cov_draws_by_its_seed_and_not_by_global_state() -> None:
    logprobs = torch.linspace(-3, -0.1, 64, dtype=torch.float64).reshape(1, 64)
    advantages, mask = logprobs - logprobs.mean(), torch.ones(1, 64, dtype=torch.bool)

    def silenced(seed: int) -> list[bool]:
        torch.manual_seed(torch.seed())
        result = clip_cov(
            logprobs, logprobs, advantages, mask, clip_cov_ratio=0.1, clip_cov_lb=0.0, clip_cov_ub=9.0, seed=seed
        )
        chosen: list[bool] = (result.per_token == 0).flatten().tolist()
        return chosen

    assert silenced(1) == silenced(1) != silenced(2)
    assert sum(silenced(1)) == 6


def test_kl_cov_binds_the_tokens_of_largest_covariance() -> None:
    logprobs = torch.tensor([[-0.1, -3.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old = logprobs.detach() - 0.1
    free = kl_cov(logprobs, old, COVARIANT, FOUR, kl_cov_ratio=0.0)
    bound = kl_cov(logprobs, old, COVARIANT, FOUR, kl_cov_ratio=0.5, ppo_kl_coef=2.0)
    assert (bound.per_token - free.per_token).flatten().tolist() == pytest.approx([0.2, 0.2, 0.0, 0.0])
    with pytest.raises(ContractError, match="kl_cov_ratio"):
        kl_cov(logprobs, old, COVARIANT, FOUR, kl_cov_ratio=2.0)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_losses_that_look_at_the_whole_mini_batch_say_so(name: str) -> None:
    assert POLICY_LOSSES[name].scope is Scope.PARTITION
    assert POLICY_LOSSES[name].traits["whole_mini_batch"] is True


@pytest.mark.parametrize(
    ("prediction", "old", "target", "loss"),
    [(1.0, 1.0, 2.0, 0.5), (2.0, 1.0, 2.0, 0.125), (0.0, 1.0, 2.0, 2.0)],
)
def test_value_loss_takes_the_worse_of_free_and_clipped(
    prediction: float, old: float, target: float, loss: float
) -> None:
    result = value_loss(scalar(prediction), scalar(old), scalar(target), ONE, cliprange_value=0.5)
    assert result.per_token.item() == pytest.approx(loss)


def test_b21_masked_values_do_not_reach_the_value_loss() -> None:
    predictions = torch.tensor([[1.0, math.nan]], requires_grad=True)
    bad = torch.tensor([[0.5, math.inf]])
    result = value_loss(predictions, bad, bad, torch.tensor([[True, False]]))
    result.per_token.sum().backward()
    assert predictions.grad is not None
    assert bool(predictions.grad.isfinite().all())
