"""Every registered estimator and loss of the library, and how to run one on a batch."""

from __future__ import annotations

from typing import Any

import torch

from tandem.algorithms import ADVANTAGES, POLICY_LOSSES
from tandem.algorithms.policy_loss import PolicyLoss
from tandem.algorithms.reduce import Aggregation, LossCounts, count, denominator, loss_numerator
from tandem.base.errors import ContractError
from tandem.base.registry import Registry, Scope
from tests.algorithms.batches import Batch

Estimate = tuple[torch.Tensor, torch.Tensor]


def own(registry: Registry[Any]) -> list[str]:
    """The library's names; what another test registered is not meant."""
    return [name for name in registry.names() if registry[name].target.__module__.startswith("tandem.")]


ESTIMATORS, LOSSES = own(ADVANTAGES), own(POLICY_LOSSES)
GROUPED = [name for name in ESTIMATORS if ADVANTAGES[name].traits.get("group_baseline")]
SPLITTABLE = [name for name in LOSSES if POLICY_LOSSES[name].scope < Scope.GROUP]
PARAMETERS: dict[str, dict[str, Any]] = {
    "dro": {"dro_beta": 0.3},
    # All candidates: which ones are drawn depends on the order, and which of two equal ones is bound.
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2},
    "kl_cov": {"kl_cov_ratio": 1.0},
}
NORM = 7.0


def loss_columns(batch: Batch, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """What any loss may read."""
    return {
        "logprobs": logprobs,
        "old_logprobs": batch.old_logprobs,
        "rollout_logprobs": batch.rollout_logprobs,
        "advantages": batch.advantages,
        "response_mask": batch.mask,
        "tis_weights": batch.weights,
    }


def run_loss(name: str, batch: Batch, logprobs: torch.Tensor, *, weigh: bool = True) -> PolicyLoss:
    """The registered loss, with the gradient going to ``logprobs``; with importance weights where it takes any."""
    given, signature = loss_columns(batch, logprobs), POLICY_LOSSES[name].signature
    optional = signature.optional_columns if weigh else ()
    columns = {column: given[column] for column in (*signature.columns, *optional)}
    return POLICY_LOSSES[name].target(**columns, **PARAMETERS.get(name, {}))


def loss_and_gradient(
    name: str, batch: Batch, mode: Aggregation, slices: list[torch.Tensor]
) -> tuple[float, torch.Tensor]:
    """As a trainer does it: numerators accumulate over micro-batches and ranks, one division at the end."""
    logprobs = batch.logprobs.clone().requires_grad_()
    counts, total = LossCounts(), torch.zeros((), dtype=torch.float64)
    for rows in slices:
        part = batch.rows(rows)
        numerator = loss_numerator(run_loss(name, part, logprobs[rows]).per_token, part.mask, mode)
        numerator.backward(retain_graph=True)
        total, counts = total + numerator.detach(), counts + count(part.mask)
    divisor = denominator(mode, counts, norm=NORM)
    assert logprobs.grad is not None
    return float(total) / divisor, logprobs.grad / divisor


def run_estimator(name: str, batch: Batch, *, valid: torch.Tensor | None = None) -> Estimate:
    """The registered estimator. ``valid`` (B,): whether there is a reward, where the estimator can be told."""
    signature, p = ADVANTAGES[name].signature, batch.old_logprobs.exp()
    given = {
        "token_rewards": batch.token_rewards,
        "response_mask": batch.mask,
        "group_ids": batch.group_ids,
        "values": batch.values,
        "old_logprobs": batch.old_logprobs,
        "sum_pi_squared": p.square() + (1 - p).square(),  # of two outcomes
        "reward_baselines": batch.components[:, 0],
        "reward_components": batch.components,
        "tis_weights": batch.weights,
    }
    optional = [name for name in signature.optional_columns if name in given]
    told = {} if valid is None or "reward_valid" not in signature.optional_columns else {"reward_valid": valid}
    return ADVANTAGES[name].target(**{c: given[c] for c in (*signature.columns, *optional)}, **told)


def run_or_refuse(name: str, batch: Batch) -> Estimate | None:
    """None where whitening is refused (a partition with fewer than two tokens that count)."""
    try:
        return run_estimator(name, batch)
    except ContractError:
        return None
