"""Which columns a policy objective asks for, and what it makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tandem.base.errors import ContractError, UnknownNameError
from tandem.train.objective import PolicyObjective, trained_counts

MakeAny = Callable[..., Any]


def test_columns_follow_from_the_loss_and_its_terms() -> None:
    assert set(PolicyObjective().columns) == {"advantages"}
    assert set(PolicyObjective(kl_coef=0.1).columns) == {"advantages", "ref_logprobs"}
    assert {"tis_weights", "old_logprobs"} <= set(PolicyObjective().optional_columns)
    assert PolicyObjective().wants_entropy and not PolicyObjective().needs_entropy
    assert PolicyObjective(entropy_coef=0.1).needs_entropy
    with pytest.raises(UnknownNameError, match="ppo_clip"):
        _ = PolicyObjective(policy_loss="ppo_clib").columns


def test_a_missing_column_is_named(make_batch: MakeAny, make_engine: MakeAny) -> None:
    batch = make_batch([3, 4])
    del batch.batch["ref_logprobs"]
    with pytest.raises(ContractError, match="ref_logprobs"):
        make_engine().forward_backward(batch, PolicyObjective(kl_coef=0.1))


def test_without_old_logprobs_the_current_ones_stand_in(
    make_batch: MakeAny, make_engine: MakeAny, grads_of: MakeAny
) -> None:
    implied, explicit = make_batch([4, 6]), make_batch([4, 6])
    del implied.batch["old_logprobs"]
    explicit.batch["old_logprobs"] = make_engine().forward(explicit, ["logprobs"])["logprobs"]
    grads = []
    for batch in (implied, explicit):
        engine = make_engine()
        engine.forward_backward(batch, PolicyObjective())
        grads.append(grads_of(engine))
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=1e-6, rtol=1e-4)


def test_importance_weights_scale_the_policy_term_and_not_the_kl(
    make_batch: MakeAny, make_engine: MakeAny, grads_of: MakeAny
) -> None:
    batch = make_batch([4, 6])
    losses = []
    for weight in (None, 1.0, 3.0, 0.0):
        if weight is not None:
            batch.batch["tis_weights"] = batch.ragged("responses").like(torch.full((10,), weight))
        losses.append(float(make_engine().forward_backward(batch, PolicyObjective(kl_coef=0.1)).loss))
    without, one, three, kl_only = losses
    assert without == one
    assert three - kl_only == pytest.approx(3 * (one - kl_only), rel=1e-4)


def test_a_token_outside_the_loss_mask_counts_in_no_part_of_the_loss(
    make_batch: MakeAny, make_engine: MakeAny, grads_of: MakeAny
) -> None:
    objective = PolicyObjective(aggregation="seq-mean-token-mean", kl_coef=0.1, entropy_coef=0.01)
    grads, kept = [], torch.tensor([True, False, True, True, False, False, False])
    for column in ("loss_mask", "response_mask"):
        batch, engine = make_batch([4, 3]), make_engine()
        batch.batch[column] = batch.ragged("responses").like(kept)
        total = engine.forward_backward(batch, objective)
        assert float(total.metrics["kl"].count) == 3
        assert (trained_counts(batch).tokens, objective.denominator(batch)) == (3, 1.0)
        grads.append(grads_of(engine))
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=1e-7, rtol=1e-5)


def test_samples_without_a_trained_token_are_no_sequences(make_batch: MakeAny) -> None:
    batch = make_batch([3, 0, 2, 4], group_size=4)
    mask = torch.tensor([True, False, True, False, False, True, True, True, True])
    batch.batch["response_mask"] = batch.ragged("responses").like(mask)
    counts = trained_counts(batch)
    assert (counts.tokens, counts.sequences) == (6, 2)


def test_the_engine_is_compared_with_the_forward_where_its_own_logprobs_are_the_old_ones(
    make_batch: MakeAny, make_engine: MakeAny
) -> None:
    batch = make_batch([4, 6])
    batch.batch["rollout_logprobs"] = batch.ragged("old_logprobs")
    found = make_engine().forward(batch, ["logprobs"])["logprobs"].values - batch.ragged("old_logprobs").values
    for from_rollout, expected in ((True, float(found.abs().mean())), (False, 0.0)):
        metrics = make_engine().forward_backward(batch, PolicyObjective(old_from_rollout=from_rollout)).metrics
        assert metrics["mismatch/abs"].mean == pytest.approx(expected, rel=1e-5)
        assert metrics["mismatch/kl"].mean == pytest.approx(-float(found.mean()) if from_rollout else 0.0, rel=1e-5)


def test_tokens_of_the_weights_that_are_trained_are_told_apart_from_older_ones(
    make_batch: MakeAny, make_engine: MakeAny
) -> None:
    batch = make_batch([4, 6])
    old, versions = batch.ragged("old_logprobs"), torch.tensor([3] * 4 + [2] * 6, dtype=torch.int32)
    batch.batch["rollout_logprobs"] = old.like(old.values - torch.where(versions == 3, 0.25, 0.5))
    batch.batch["token_versions"] = old.like(versions)
    metrics = make_engine().forward_backward(batch, PolicyObjective(version=3)).metrics
    assert metrics["mismatch/abs_same"].mean == pytest.approx(0.25, rel=1e-4)
    assert metrics["mismatch/abs_older"].mean == pytest.approx(0.5, rel=1e-4)
    assert float(metrics["mismatch/abs_same"].count) == 4


def test_entropies_are_reported_and_change_no_gradient_without_a_bonus(
    make_batch: MakeAny, make_engine: MakeAny, grads_of: MakeAny, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, grads = make_batch([4, 6]), []
    for wanted in (True, False):
        monkeypatch.setattr(PolicyObjective, "wants_entropy", wanted)
        engine = make_engine()
        found = engine.forward_backward(batch, PolicyObjective())
        assert ("entropy" in found.metrics) == wanted
        grads.append(grads_of(engine))
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name])
