"""Importance weights and rejections between rollout and trainer: hand-computed values, invariants, errors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.rollout_correction import CorrectionRules, Rejection, Weighting, correct_rollout
from tandem.base.errors import ContractError
from tandem.base.registry import Scope
from tandem.config.correction import RejectionConfig, RolloutCorrectionConfig
from tests.algorithms.batches import Batch, batches

OLD = torch.tensor([[0.0, 0.0], [0.0, 0.0]]).double()
MASK = torch.tensor([[True, True], [True, False]])


def rollout(*ratios: float) -> torch.Tensor:
    """Rollout log-probs under which old / rollout has these values, on the three trained tokens."""
    logs = [-math.log(ratio) for ratio in ratios]
    return torch.tensor([[logs[0], logs[1]], [logs[2], math.nan]], dtype=torch.float64)


def test_token_weights_are_truncated_or_banded() -> None:
    truncated = correct_rollout(OLD, rollout(0.3, 4.0, 1.5), MASK, weighting=Weighting())
    assert truncated.weights is not None
    torch.testing.assert_close(truncated.weights, torch.tensor([[0.3, 2.0], [1.5, 0.0]]).double())
    banded = correct_rollout(OLD, rollout(0.3, 4.0, 1.5), MASK, weighting=Weighting(floor=0.5))
    assert banded.weights is not None
    torch.testing.assert_close(banded.weights, torch.tensor([[0.0, 0.0], [1.5, 0.0]]).double())
    assert banded.metrics["above"] == banded.metrics["below"] == pytest.approx(1 / 3)


def test_sequence_weights_are_products() -> None:
    result = correct_rollout(OLD, rollout(0.5, 1.6, 1.2), MASK, weighting=Weighting("sequence"))
    assert result.weights is not None
    torch.testing.assert_close(result.weights, torch.tensor([[0.8, 0.8], [1.2, 0.0]]).double())
    normal = correct_rollout(OLD, rollout(0.5, 1.6, 1.2), MASK, weighting=Weighting("sequence", normalize=True))
    assert normal.weights is not None
    torch.testing.assert_close(normal.weights, result.weights / 1.0)


@pytest.mark.parametrize(
    ("rejection", "kept"),
    [
        (Rejection("token_k1", 1.5), [[True, False], [True, False]]),
        (Rejection("token_k1", 3.0, low=1.1), [[False, True], [False, False]]),
        (Rejection("token_k2", 0.1), [[True, False], [True, False]]),
        (Rejection("token_k3", 0.1), [[True, False], [True, False]]),
        (Rejection("seq_sum_k1", 1.5), [[False, False], [True, False]]),
        (Rejection("seq_mean_k1", 1.5), [[True, True], [True, False]]),
        (Rejection("seq_max_k2", 0.1), [[False, False], [True, False]]),
    ],
)
def test_rejections_by_hand(rejection: Rejection, kept: list[list[bool]]) -> None:
    result = correct_rollout(OLD, rollout(1.0, 2.0, 0.9), MASK, rejections=[rejection])
    assert result.response_mask.tolist() == kept
    assert result.weights is None


@pytest.mark.parametrize(
    ("rejection", "kept"),
    [
        (Rejection("token_k1", 2.5, low=0.95), [[True, True], [False, False]]),
        (Rejection("seq_sum_k1", 2.5, low=0.95), [[True, True], [False, False]]),
        (Rejection("seq_mean_k1", 1.5, low=0.95), [[True, True], [False, False]]),
        (Rejection("seq_min_k1", low=0.95), [[True, True], [False, False]]),
    ],
)
def test_a_lopsided_band_is_on_old_over_rollout(rejection: Rejection, kept: list[list[bool]]) -> None:
    """On rollout / old, as other systems have it, the same numbers keep the other side."""
    assert correct_rollout(OLD, rollout(1.0, 2.0, 0.9), MASK, rejections=[rejection]).response_mask.tolist() == kept
    other_side = correct_rollout(OLD, rollout(1.0, 0.5, 1 / 0.9), MASK, rejections=[rejection])
    assert other_side.response_mask.tolist() != kept


def test_rejections_judge_the_mask_as_given_in_any_order() -> None:
    both = [Rejection("token_k1", 1.5), Rejection("seq_max_k2", 0.1)]
    results = [correct_rollout(OLD, rollout(1.0, 2.0, 0.9), MASK, rejections=order) for order in (both, both[::-1])]
    assert results[0].response_mask.tolist() == results[1].response_mask.tolist() == [[False, False], [True, False]]
    assert results[0].metrics["rejected"] == pytest.approx(2 / 3)
    assert results[0].metrics["rejected_sequences"] == 0.5


@settings(max_examples=25, deadline=None)
@given(batch=batches(), level=st.sampled_from(["token", "sequence"]), fill=st.sampled_from([math.nan, -math.inf]))
def test_masked_log_probs_reach_neither_weights_nor_metrics(batch: Batch, level: str, fill: float) -> None:
    def corrected(given: Batch) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, float]]:
        rejections = [Rejection("token_k1", 2.0), Rejection("seq_mean_k3", 0.5)]
        result = correct_rollout(
            given.logprobs, given.old_logprobs, given.mask, weighting=Weighting(level), rejections=rejections
        )
        return result.weights, result.response_mask, result.metrics

    weights, kept, metrics = corrected(batch)
    other_weights, other_kept, other_metrics = corrected(batch.with_masked(fill))
    assert weights is not None
    assert other_weights is not None
    assert torch.equal(weights, other_weights)
    assert torch.equal(kept, other_kept)
    assert metrics == other_metrics
    assert not weights[~batch.mask].any()


def test_impossible_corrections_are_refused() -> None:
    with pytest.raises(ContractError, match="token"):
        Weighting("tokens")
    with pytest.raises(ContractError, match="floor <= cap"):
        Weighting(cap=0.5, floor=2.0)
    with pytest.raises(ContractError, match="token_k1"):
        Rejection("token_k9", 1.0)
    with pytest.raises(ContractError, match="lower bound"):
        Rejection("token_k2", 1.0, low=0.5)
    with pytest.raises(ContractError, match="low <= high"):
        Rejection("token_k1", 0.5, low=0.8)
    with pytest.raises(ContractError, match="no trained token"):
        correct_rollout(OLD, OLD, torch.zeros(2, 2, dtype=torch.bool), weighting=Weighting())


# -- truncated weights --


def test_truncated_weights_and_the_mismatch_by_hand() -> None:
    old = torch.tensor([[-1.0, -1.0, -1.0, math.nan]], requires_grad=True)
    behaviour = torch.tensor([[-1.5, -3.0, -0.5, 0.0]])
    result = correct_rollout(old, behaviour, torch.tensor([[True, True, True, False]]), weighting=Weighting(cap=2.0))
    assert result.weights is not None
    torch.testing.assert_close(result.weights, torch.tensor([[math.exp(0.5), 2.0, math.exp(-0.5), 0.0]]))
    assert not result.weights.requires_grad
    assert result.metrics["ratio_max"] == pytest.approx(math.exp(2.0), rel=1e-6)
    assert result.metrics["ratio_q50"] == pytest.approx(math.exp(0.5), rel=1e-6)
    assert result.metrics["above"] == pytest.approx(1 / 3)
    assert result.metrics["mismatch_kl"] == pytest.approx(-(0.5 + 2.0 - 0.5) / 3, rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(batch=batches(), cap=st.floats(0.5, 5.0), level=st.sampled_from(["token", "sequence"]))
def test_equal_engines_need_no_correction(batch: Batch, cap: float, level: str) -> None:
    rules = [Rejection("token_k1", 1.01), Rejection("seq_max_k3", 0.01), Rejection("seq_min_k1", low=0.5)]
    result = correct_rollout(
        batch.old_logprobs, batch.old_logprobs, batch.mask, weighting=Weighting(level, cap), rejections=rules
    )
    assert result.weights is not None
    torch.testing.assert_close(result.weights, batch.mask.double() * min(1.0, cap))
    assert torch.equal(result.response_mask, batch.mask)
    assert result.metrics["ratio_max"] == 1.0 and result.metrics["rejected"] == 0.0


# -- veto and quantiles --


@pytest.mark.parametrize(
    "rule",
    [
        Rejection("seq_min_k1", low=1.5),
        Rejection("seq_max_k2", 0.4),
        Rejection("seq_max_k3", 0.5),
        Rejection("seq_min_k1", quantile=0.5),
    ],
    ids=str,
)
def test_an_extreme_is_that_of_the_trained_tokens_whatever_the_padding(rule: Rejection) -> None:
    ratios = torch.tensor([[2.0, 3.0], [2.2, 1.6]])
    mask = torch.tensor([[True, True], [True, True]])
    narrow = correct_rollout(torch.zeros(2, 2), -ratios.log(), mask, rejections=[rule])
    padded = torch.nn.functional.pad
    wide = correct_rollout(torch.zeros(2, 4), padded(-ratios.log(), (0, 2)), padded(mask, (0, 2)), rejections=[rule])
    assert torch.equal(wide.response_mask[:, :2], narrow.response_mask)
    assert wide.metrics["rejected"] == narrow.metrics["rejected"]
    if rule.low is not None:
        assert torch.equal(narrow.response_mask, mask)


def test_a_veto_leaves_out_the_whole_answer() -> None:
    result = correct_rollout(OLD, rollout(1.0, 1e-5, 0.9), MASK, rejections=[Rejection("seq_min_k1", low=1e-4)])
    assert result.response_mask.tolist() == [[False, False], [True, False]]
    assert result.metrics["rejected_sequences"] == 0.5


def test_a_quantile_keeps_the_least_drifted_part() -> None:
    tokens = correct_rollout(OLD, rollout(1.1, 4.0, 0.5), MASK, rejections=[Rejection("token_k1", quantile=0.6)])
    assert tokens.response_mask.tolist() == [[True, False], [True, False]]  # 2 of 3, by |log ratio|
    answers = correct_rollout(OLD, rollout(1.1, 4.0, 0.5), MASK, rejections=[Rejection("seq_sum_k1", quantile=0.5)])
    assert answers.response_mask.tolist() == [[False, False], [True, False]]  # log 4.4 against log 0.5


@settings(max_examples=25, deadline=None)
@given(batch=batches(), quantile=st.floats(0.01, 0.99), by=st.sampled_from(["token_k1", "seq_mean_k3", "seq_max_k2"]))
def test_a_quantile_keeps_at_least_its_part_of_the_partition(batch: Batch, quantile: float, by: str) -> None:
    rules = [Rejection(by, quantile=quantile)]
    kept = correct_rollout(batch.logprobs, batch.old_logprobs, batch.mask, rejections=rules).response_mask
    whole, left = (
        (batch.mask, kept) if by == "token_k1" else (batch.mask.any(-1), kept.any(-1))  # tokens, or answers
    )
    assert int(whole.sum()) >= int(left.sum()) >= quantile * int(whole.sum()) - 1e-9
    assert not kept[~batch.mask].any()


@settings(max_examples=25, deadline=None)
@given(batch=batches(), data=st.data())
def test_order_and_padding_change_no_correction(batch: Batch, data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.permutations(range(len(batch.mask)))))
    rules = [Rejection("token_k1", 1.5), Rejection("seq_mean_k1", quantile=0.7), Rejection("seq_min_k1", low=0.6)]

    def corrected(given: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        weighting = Weighting("sequence", normalize=True)
        found = correct_rollout(given.logprobs, given.old_logprobs, given.mask, weighting=weighting, rejections=rules)
        assert found.weights is not None
        return found.weights, found.response_mask

    weights, kept = corrected(batch)
    moved, moved_kept = corrected(batch.rows(order).padded(3, math.inf))
    width = batch.mask.shape[1]
    torch.testing.assert_close(moved[:, :width], weights[order])
    assert torch.equal(moved_kept[:, :width], kept[order])


# -- from the config --


@pytest.mark.parametrize(
    ("config", "scope", "gives"),
    [
        ({}, Scope.TOKEN, ()),
        ({"weights": "token"}, Scope.TOKEN, ("tis_weights",)),
        ({"weights": "sequence"}, Scope.SEQUENCE, ("tis_weights",)),
        ({"weights": "token", "normalize": True}, Scope.PARTITION, ("tis_weights",)),
        ({"veto": 1e-4}, Scope.SEQUENCE, ("loss_mask",)),
        ({"reject": [RejectionConfig(by="token_k2", high=0.1)]}, Scope.TOKEN, ("loss_mask",)),
        ({"reject": [RejectionConfig(by="token_k2", quantile=0.9)]}, Scope.PARTITION, ("loss_mask",)),
        ({"weights": "token", "veto": 0.1}, Scope.SEQUENCE, ("tis_weights", "loss_mask")),
    ],
)
def test_scope_and_columns_follow_from_what_is_chosen(
    config: dict[str, object], scope: Scope, gives: tuple[str, ...]
) -> None:
    written = RolloutCorrectionConfig.model_validate(config)
    assert CorrectionRules.of(written).scope is scope
    assert written.gives == gives


def test_quantiles_and_vetoes_take_no_other_bounds() -> None:
    for wrong in (
        {"statistic": "token_k1", "quantile": 0.5, "high": 2.0},
        {"statistic": "token_k1", "quantile": 1.0},
        {"statistic": "seq_min_k1", "high": 2.0},
        {"statistic": "seq_min_k1"},
        {"statistic": "token_k1"},
    ):
        with pytest.raises(ContractError, match="write"):
            Rejection(**wrong)  # type: ignore[arg-type]
