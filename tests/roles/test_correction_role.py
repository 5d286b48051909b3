"""The correction stage on a batch: its columns, and the report of the whole partition."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.config.correction import RejectionConfig, RolloutCorrectionConfig
from tandem.roles.correction import corrected, mismatch_report

LENGTHS = [2, 0, 3]


def batch_of(*ratios: float, mask: list[bool] | None = None) -> DataProto:
    """Three answers of 2, 0 and 3 tokens whose old / rollout are these."""
    rollout = Ragged.from_lengths(-torch.tensor(ratios).log(), LENGTHS)
    trained = torch.tensor([True] * 5 if mask is None else mask)
    return DataProto(
        {
            "responses": rollout.like(torch.arange(5)),
            "response_mask": rollout.like(trained),
            "old_logprobs": rollout.like(torch.zeros(5)),
            "rollout_logprobs": rollout,
        }
    )


def test_weights_and_the_loss_mask_follow_the_answers_lengths() -> None:
    rule = RejectionConfig(by="seq_mean_k1", low=0.5, high=1.5)
    config = RolloutCorrectionConfig(weights="token", cap=3.0, reject=[rule])
    found = corrected(batch_of(4.0, 2.0, 1.0, 0.5, 1.2), config)
    torch.testing.assert_close(found.ragged("tis_weights").values, torch.tensor([3.0, 2.0, 1.0, 0.5, 1.2]))
    assert found.ragged("loss_mask").values.tolist() == [False, False, True, True, True]
    assert found.ragged("loss_mask").lengths.tolist() == LENGTHS


def test_the_report_is_of_the_trained_tokens_and_needs_both_log_probs() -> None:
    batch = batch_of(4.0, 2.0, 1.0, 0.5, math.nan, mask=[True, True, True, True, False])
    plain = mismatch_report(batch, RolloutCorrectionConfig())
    assert plain["mismatch/ratio_max"] == pytest.approx(4.0)
    assert plain["mismatch/kl"] == pytest.approx(-math.log(4.0 * 2.0 * 1.0 * 0.5) / 4)
    assert plain["mismatch/rejected"] == 0 and not any("weight" in name for name in plain)
    weighed = mismatch_report(batch, RolloutCorrectionConfig(weights="token", veto=0.7))
    assert weighed["mismatch/above"] == weighed["mismatch/rejected_sequences"] / 2 == 0.25
    del batch.batch["old_logprobs"]
    assert mismatch_report(batch, RolloutCorrectionConfig()) == {}


def test_a_partition_that_trains_nothing_weighs_nothing() -> None:
    batch = batch_of(1.0, 1.0, 1.0, 1.0, 1.0, mask=[False] * 5)
    config = RolloutCorrectionConfig(weights="sequence", normalize=True, veto=0.1)
    found = corrected(batch, config)
    assert not found.ragged("tis_weights").values.any()
    assert not found.ragged("loss_mask").values.any()
    assert mismatch_report(found, config) == {}
