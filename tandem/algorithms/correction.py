"""Correction for the gap between the engine that sampled and the trainer that learns.

The engine's numerics, and under staleness its weights, differ from the trainer's at the start of a step. The ratio
``pi_old / pi_rollout`` re-weights the samples; truncating it bounds the variance. ``tis_weights`` is the form used by
``algorithm.use_tis``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.algorithms.masked import masked_mean, select
from tandem.algorithms.policy_loss import FINITE_LIMIT, log_ratio
from tandem.base.errors import ContractError
from tandem.base.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

QUANTILES = (0.01, 0.5, 0.99)


@dataclass(frozen=True)
class Correction:
    """``weights`` (B, T): detached, 0 outside the mask. ``metrics``: of the samples given, so call it once a partition.

    ``mismatch_kl`` and ``mismatch_k3`` estimate KL(rollout || old) per token; ``ratio_*`` describe ``old / rollout``
    before truncation, over the trained tokens; ``truncated`` is the fraction above the cap.
    """

    weights: torch.Tensor
    metrics: dict[str, float]


def tis_weights(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, response_mask: torch.Tensor, *, cap: float = 2.0
) -> Correction:
    """Truncated importance weights ``min(pi_old / pi_rollout, cap)`` per token; inputs (B, T), ``cap`` > 0.

    Ionides, "Truncated importance sampling" (2008), as used between engine and trainer by Yao et al.
    (2025), "Your efficient RL framework secretly brings you off-policy RL training".
    """
    if cap <= 0:
        raise ContractError(f"tis cap = {cap}: write a positive bound on the weight, such as 2.0")
    delta = log_ratio(old_logprobs.detach(), rollout_logprobs.detach(), response_mask, FINITE_LIMIT)
    ratio = delta.exp()
    weights = select(ratio.clamp(max=cap), response_mask)
    return Correction(
        weights, mismatch_metrics(delta, response_mask) | {"truncated": _mean(ratio > cap, response_mask)}
    )


def mismatch_metrics(delta: torch.Tensor, response_mask: torch.Tensor) -> dict[str, float]:
    """Statistics of ``delta = log(pi_old / pi_rollout)`` (B, T) over the trained tokens; all 0 where there are none."""
    names = [f"ratio_q{int(q * 100):02d}" for q in QUANTILES] + ["ratio_max"]
    delta = delta.double()
    ratio = delta[response_mask].exp()
    if ratio.numel() == 0:
        spread = dict.fromkeys(names, 0.0)
    else:
        ordered = ratio.sort().values
        ranks = [round(q * (len(ordered) - 1)) for q in (*QUANTILES, 1.0)]
        spread = {name: float(ordered[rank]) for name, rank in zip(names, ranks, strict=True)}
    k3 = delta.exp() - delta - 1
    return {"mismatch_kl": _mean(-delta, response_mask), "mismatch_k3": _mean(k3, response_mask)} | spread


def _mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    return float(masked_mean(values.double(), mask))
