"""The value loss and the rollout correction by hand, at the places where a slip would show."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithms.reduce import LossCounts
from tandem.algorithms.rollout_correction import Rejection, Weighting, correct_rollout, mismatch_metrics
from tandem.algorithms.value_loss import value_loss


def row(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype)


def ones(count: int) -> torch.Tensor:
    return torch.ones(1, count, dtype=torch.bool)


# -- the value loss --


@pytest.mark.parametrize(
    ("prediction", "old", "target", "loss", "clipped"),
    [
        (3.0, 1.0, 2.0, 0.5 * 1.0, 0.0),  # moved past the target: the free error is the larger one
        (2.0, 1.0, 2.0, 0.5 * 0.25, 1.0),  # arrived, but faster than allowed: bounded at 1.5
        (0.0, 1.0, 0.0, 0.5 * 0.25, 1.0),  # the same downwards: bounded at 0.5
        (-1.0, 1.0, 0.25, 0.5 * 1.5625, 0.0),
        (1.25, 1.0, 2.0, 0.5 * 0.5625, 0.0),  # within the range both are one, and nothing is clipped
        (1.0, 1.0, 1.0, 0.0, 0.0),
    ],
)
def test_the_value_loss_is_half_the_worse_of_two_squares(
    prediction: float, old: float, target: float, loss: float, clipped: float
) -> None:
    result = value_loss(row(prediction), row(old), row(target), ones(1))  # a range of 0.5 is the default
    assert result.per_token.item() == pytest.approx(loss, abs=1e-15)
    assert result.metrics["value_clipfrac"].mean == clipped
    assert result.metrics["value_mean"].mean == prediction


def test_a_wider_range_lets_the_critic_move_further() -> None:
    assert value_loss(row(2), row(1), row(2), ones(1), cliprange_value=1.0).per_token.item() == 0.0
    assert value_loss(row(0), row(1), row(0), ones(1), cliprange_value=0.75).per_token.item() == 0.5 * 0.0625


def test_counts_begin_with_nothing() -> None:
    assert LossCounts() == LossCounts(tokens=0, sequences=0)


# -- rejections --

DRIFT = (1.0, -1.0, 0.5)
K3 = [math.exp(d) - 1 - d for d in DRIFT]
"""Of the drifts 1, -1 and 0.5: k2 is 0.5, 0.5 and 0.125, k3 0.718, 0.368 and 0.149."""


@pytest.mark.parametrize(
    ("statistic", "bounds", "kept"),
    [
        ("token_k1", {"high": 2.0}, [False, False, True]),  # ratios 2.72, 0.37 and 1.65, down to 1 / 2
        ("token_k1", {"high": 2.8}, [True, True, True]),
        ("token_k1", {"high": 2.0, "low": 0.3}, [False, True, True]),
        ("token_k2", {"high": 0.4}, [False, False, True]),
        ("token_k3", {"high": 0.5}, [False, True, True]),
        ("token_k3", {"high": 0.14}, [False, False, False]),
    ],
)
def test_tokens_are_rejected_one_by_one(statistic: str, bounds: dict[str, float], kept: list[bool]) -> None:
    zeros = torch.zeros(1, 3, dtype=torch.float64)
    result = correct_rollout(row(*DRIFT), zeros, ones(3), rejections=[Rejection(statistic, **bounds)])
    assert result.response_mask[0].tolist() == kept
    assert result.metrics["rejected"] == pytest.approx(kept.count(False) / 3)


@pytest.mark.parametrize(
    ("statistic", "value"),
    [
        ("seq_sum_k1", math.exp(0.5)),
        ("seq_sum_k2", 1.125),
        ("seq_sum_k3", sum(K3)),
        ("seq_mean_k1", math.exp(0.5 / 3)),
        ("seq_mean_k2", 0.375),
        ("seq_mean_k3", sum(K3) / 3),
        ("seq_max_k2", 0.5),
        ("seq_max_k3", max(K3)),
    ],
)
def test_a_sequence_is_rejected_by_one_value(statistic: str, value: float) -> None:
    """An answer of three tokens, and one beside it that did not drift."""
    old = torch.tensor([DRIFT, (0.0, 0.0, 0.0)], dtype=torch.float64)
    mask = torch.ones(2, 3, dtype=torch.bool)
    for high, kept in ((value + 1e-9, True), (value - 1e-9, False)):
        result = correct_rollout(old, torch.zeros_like(old), mask, rejections=[Rejection(statistic, high)])
        assert result.response_mask.tolist() == [[kept] * 3, [True] * 3]
        assert result.metrics["rejected_sequences"] == (0.0 if kept else 0.5)


def test_the_smallest_ratio_of_a_sequence_vetoes_it() -> None:
    for low, kept in ((math.exp(-1) - 1e-9, True), (math.exp(-1) + 1e-9, False)):
        result = correct_rollout(row(*DRIFT), row(0, 0, 0), ones(3), rejections=[Rejection("seq_min_k1", low=low)])
        assert result.response_mask[0].tolist() == [kept] * 3


# -- what is told, and weights --


def test_the_mismatch_is_told_by_two_estimates_and_quantiles() -> None:
    told = mismatch_metrics(torch.tensor([[*DRIFT, 9.0]]).double(), torch.tensor([[True, True, True, False]]))
    assert told["mismatch_kl"] == pytest.approx(-0.5 / 3)
    assert told["mismatch_k3"] == pytest.approx(sum(K3) / 3)
    ratios = sorted(math.exp(d) for d in DRIFT)
    assert [told[name] for name in ("ratio_q01", "ratio_q50", "ratio_q99", "ratio_max")] == pytest.approx(
        [ratios[0], ratios[1], ratios[2], ratios[2]]
    )
    nothing = mismatch_metrics(torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.bool))
    assert set(nothing) == set(told) and set(nothing.values()) == {0.0}


def test_weights_are_told_before_they_are_normalised() -> None:
    old = row(math.log(0.5), math.log(1.5), math.log(4.0))
    result = correct_rollout(old, row(0, 0, 0), ones(3), weighting=Weighting(cap=2.5, normalize=True))
    assert result.weights is not None
    assert result.weights[0].tolist() == pytest.approx([0.5 / 1.5, 1.0, 2.5 / 1.5])
    told = result.metrics
    assert told["weight_mean"] == pytest.approx(1.5)
    assert told["weight_std"] == pytest.approx(math.sqrt((0.25 + 2.25 + 6.25) / 3 - 2.25))
    assert (told["weight_max"], told["weight_min"]) == (pytest.approx(2.5), pytest.approx(0.5))
    assert told["weight_ess"] == pytest.approx(2.25 * 3 / 8.75)
    assert (told["above"], told["below"]) == (pytest.approx(1 / 3), 0.0)  # below 1 / 2.5 there is none


def test_outside_its_band_a_weight_is_0() -> None:
    old = row(math.log(0.5), math.log(1.5), math.log(4.0), math.log(2.0))
    result = correct_rollout(old, torch.zeros_like(old), ones(4), weighting=Weighting(cap=3.0, floor=0.75))
    assert result.weights is not None
    assert result.weights[0].tolist() == pytest.approx([0.0, 1.5, 0.0, 2.0])
    assert (result.metrics["above"], result.metrics["below"]) == (0.25, 0.25)


def test_the_spread_of_weights_near_1_keeps_its_digits() -> None:
    """Ratios 1 and 1 + 2^-12 have the spread 2^-13; the difference of two means near 1 has none of it in float32."""
    old = torch.tensor([[0.0, math.log1p(2.0**-12)]], dtype=torch.float32)
    result = correct_rollout(old, torch.zeros_like(old), ones(2), weighting=Weighting())
    assert result.metrics["weight_std"] == pytest.approx(2.0**-13, rel=1e-3)
