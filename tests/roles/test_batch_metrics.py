"""The numbers of a partition, and what may be trained at all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.roles.batch_metrics import batch_metrics, check_lag, sample_lags
from tests.roles.fake_training import scored

VERSIONS = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6)


def versioned(versions: list[list[int]]) -> DataProto:
    return DataProto({"token_versions": Ragged.from_rows([torch.tensor(v, dtype=torch.int32) for v in versions])})


@given(VERSIONS, st.integers(9, 12), st.integers(0, 5))
def test_b42_lag_is_of_the_oldest_token_and_bounded(versions: list[list[int]], step: int, bound: int) -> None:
    batch = versioned(versions)
    lags = [step - min(row) for row in versions if row]
    assert sample_lags(batch, step).tolist() == lags
    if any(lag > bound for lag in lags):
        with pytest.raises(
            ContractError, match=f"step {step} .*lags {min(lags)} to {max(lags)}; max_staleness is {bound}"
        ):
            check_lag(batch, step, bound)
    else:
        check_lag(batch, step, bound)


def test_tokens_of_weights_that_do_not_exist_yet_are_refused() -> None:
    with pytest.raises(ContractError, match="lags -1 to 0"):
        check_lag(versioned([[3, 3], [4]]), 3, 2)


def test_rewards_count_only_where_they_are_valid() -> None:
    batch = scored(3, 2, rewards=[1.0, 0.0, 0.5, 0.5, float("nan"), 7.0])
    batch.batch["reward_valid"] = torch.tensor([True, True, True, True, False, False])
    metrics = batch_metrics(batch, 0)
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/excluded"] == 2
    assert metrics["reward/groups_without_signal"] == 1
    assert (metrics["length/mean"], metrics["length/max"], metrics["lag/max"]) == (3, 3, 0)


def test_advantages_are_those_of_trained_tokens() -> None:
    batch = scored(1, 3, rewards=[1.0, 0.0, 0.5])
    layout = batch.ragged("responses")
    batch.batch["response_mask"] = layout.like(torch.tensor([True, True, False] * 3))
    batch.batch["advantages"] = layout.like(torch.tensor([2.0, 2.0, 9.0, -1.0, -1.0, 9.0, 0.0, 0.0, 9.0]))
    metrics = batch_metrics(batch, 0)
    assert metrics["advantage/mean"] == pytest.approx(1 / 3)
    assert metrics["advantage/std"] == pytest.approx((14 / 9) ** 0.5)
    assert metrics["advantage/zero_share"] == pytest.approx(1 / 3)
    batch.batch["loss_mask"] = layout.like(torch.zeros(9, dtype=torch.bool))
    assert not [key for key in batch_metrics(batch, 0) if key.startswith("advantage/")]
