"""Where a computation is bounded so that one absurd token owns nothing: on either side of each bound."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithms.behaviour_losses import decoupled_ppo, m2po
from tandem.algorithms.distillation import reverse_kl
from tandem.algorithms.kl import AdaptiveKL, k3
from tandem.algorithms.policy_loss import log_ratio, ppo_clip
from tandem.algorithms.preference_losses import orpo
from tandem.algorithms.ratio_losses import cispo, dppo_tv, sapo
from tandem.algorithms.reduce import LossCounts, denominator
from tandem.algorithms.rollout_correction import Weighting, correct_rollout
from tandem.algorithms.sequence_losses import clip_cov, geo_mean, kl_cov


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def ones(count: int) -> torch.Tensor:
    return torch.ones(1, count, dtype=torch.bool)


DRIFT = (19.5, 20.5, 79.5, 80.5, -19.5, -20.5, -79.5, -80.5)
ZERO = row(*([0] * len(DRIFT)))
NEAR = (19.5, 20.0, 20.0, 20.0, -19.5, -20.0, -20.0, -20.0)
WIDE = (19.5, 20.5, 79.5, 80.0, -19.5, -20.5, -79.5, -80.0)


def test_log_ratios_are_bounded_at_20_and_where_a_loss_is_defined_without_at_80() -> None:
    mask = ones(len(DRIFT))
    assert log_ratio(row(*DRIFT), ZERO, mask)[0].tolist() == list(NEAR)
    assert log_ratio(ZERO, row(*DRIFT), mask)[0].tolist() == [-limited for limited in NEAR]
    assert log_ratio(row(*DRIFT), ZERO, mask, 80.0)[0].tolist() == list(WIDE)


@pytest.mark.parametrize(
    ("loss", "limited"),
    [(ppo_clip, NEAR), (cispo, NEAR), (dppo_tv, NEAR), (sapo, NEAR), (geo_mean, WIDE), (clip_cov, WIDE), (m2po, WIDE)],
)
def test_the_kl_that_a_loss_reports_is_of_bounded_log_ratios(loss: object, limited: tuple[float, ...]) -> None:
    assert callable(loss)
    for sign in (1.0, -1.0):
        for drift, bounded in zip(DRIFT, limited, strict=True):
            result = loss(row(sign * drift), row(0), row(0), ones(1))
            assert result.metrics["ppo_kl"].mean == -sign * bounded


def test_kl_cov_reports_the_mean_distance() -> None:
    result = kl_cov(row(*DRIFT), ZERO, ZERO, ones(len(DRIFT)))
    assert result.metrics["ppo_kl"].mean == sum(map(abs, WIDE)) / len(WIDE)


def test_a_weight_is_of_a_log_ratio_bounded_at_20() -> None:
    result = decoupled_ppo(row(19.5, 30), row(19.5, 30), row(0, 0), row(1, 1), ones(2), behaviour_cap=None)
    assert (-result.per_token).log()[0].tolist() == pytest.approx([19.5, 20.0])
    for drift, ratio in ((30.0, math.exp(20)), (-30.0, math.exp(-20))):
        for level in ("token", "sequence"):
            corrected = correct_rollout(row(drift), row(0), ones(1), weighting=Weighting(level, cap=1e12))
            assert corrected.weights is not None
            assert corrected.weights.item() == pytest.approx(ratio, rel=1e-12)


def test_a_teacher_pulls_by_20_at_most() -> None:
    terms = reverse_kl(row(-30, 0, -5), row(0, -30, 0), ones(3))
    assert terms.advantages is not None
    assert terms.advantages[0].tolist() == [20.0, -20.0, 5.0]


def test_the_k3_estimate_is_bounded_at_10() -> None:
    found = k3(row(0, 0, -2, -3, -50), row(1, -50, 0, 0, 0))
    assert found[0].tolist() == pytest.approx([math.e - 2, 10.0, math.exp(2) - 3, 10.0, 10.0])


def test_an_adaptive_coefficient_moves_by_a_fifth_of_the_share_of_its_horizon() -> None:
    for kl, factor in ((0.0, 0.98), (1.5, 0.98), (1.9, 0.995), (2.0, 1.0), (2.1, 1.005), (2.5, 1.02), (9.0, 1.02)):
        controller = AdaptiveKL(coef=0.5, target=2.0, horizon=100)
        controller.update(kl, samples=10)
        assert controller.coef == pytest.approx(0.5 * factor, rel=1e-12)


def test_the_odds_of_a_certain_answer_are_finite() -> None:
    preferred, ids = torch.tensor([True, False]), torch.tensor([1, 1])
    logprobs = torch.tensor([[0.0], [-1.0]], dtype=torch.float64)
    result = orpo(logprobs, torch.ones(2, 1, dtype=torch.bool), preferred, ids, beta=1.0)
    odds = [math.log(math.exp(m) / (1 - math.exp(m))) for m in (-1e-6, -1.0)]
    assert result.metrics["preference/log_odds_ratio"].mean == pytest.approx(odds[0] - odds[1], rel=1e-6)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-sum", 1.0),
        ("token-mean", 6.0),
        ("seq-mean-token-sum", 2.0),
        ("seq-mean-token-mean", 2.0),
        ("seq-mean-token-sum-norm", 5.0),
    ],
)
def test_what_a_loss_is_divided_by(mode: str, expected: float) -> None:
    assert denominator(mode, LossCounts(tokens=6, sequences=2), norm=2.5) == expected
    nothing = 2.5 if mode == "seq-mean-token-sum-norm" else 1.0
    assert denominator(mode, LossCounts(), norm=2.5) == nothing
    assert LossCounts(1, 2) + LossCounts(30, 40) == LossCounts(31, 42)
