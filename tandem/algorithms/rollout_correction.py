"""Importance weights and rejection between the policy that sampled and the trainer's at the start of a step.

``tis_weights`` in ``tandem.algorithms.correction`` is the plain form. Here weights may be of whole sequences, may be
zero outside a band instead of truncated, and tokens or sequences that drifted too far may be left out altogether. The
mask that comes back is final: loss counts are to be taken from it, not from the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tandem.algorithms.correction import mismatch_metrics
from tandem.algorithms.masked import masked_mean, masked_sum, select
from tandem.algorithms.policy_loss import FINITE_LIMIT, LOG_RATIO_LIMIT, log_ratio
from tandem.base.errors import ContractError
from tandem.base.lazy import LazyModule
from tandem.base.registry import near

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


class Level(StrEnum):
    """Whether a weight belongs to a token or, as the product of its tokens' ratios, to a sequence."""

    TOKEN = "token"
    SEQUENCE = "sequence"


@dataclass(frozen=True)
class Weighting:
    """How ratios ``pi_old / pi_rollout`` become weights.

    Without ``floor`` they are truncated at ``cap`` (Espeholt et al., arXiv 1802.01561). With it, weights outside
    ``[floor, cap]`` are 0 (IcePop). ``normalize`` divides by the mean weight of the partition.
    """

    level: str = Level.TOKEN
    cap: float = 2.0
    floor: float | None = None
    normalize: bool = False

    def __post_init__(self) -> None:
        if self.level not in list(Level):
            raise ContractError(f"weights of level {self.level!r}: {near(self.level, list(Level))}")
        if self.cap <= 0 or not 0 <= (self.floor or 0.0) <= self.cap:
            raise ContractError(f"weights in [{self.floor}, {self.cap}]: write 0 <= floor <= cap, and cap above 0")


REDUCTIONS = ("token", "seq_sum", "seq_mean", "seq_max")
DIVERGENCES = ("k1", "k2", "k3")
STATISTICS = tuple(f"{r}_{d}" for r in REDUCTIONS for d in DIVERGENCES if (r, d) != ("seq_max", "k1"))


@dataclass(frozen=True)
class Rejection:
    """Leave out what drifted: tokens by ``token_*``, whole sequences by the sum, mean or maximum over their tokens.

    ``k1`` looks at the ratio old / rollout (a sequence's: exp of the sum or mean of its log-ratios) and keeps
    ``[low, high]``, where ``low`` defaults to 1 / high. ``k2`` = (log r)^2 / 2 and ``k3`` = r - 1 - log r keep up to
    ``high``.
    """

    statistic: str
    high: float
    low: float | None = None

    def __post_init__(self) -> None:
        if self.statistic not in STATISTICS:
            raise ContractError(f"rejection by {self.statistic!r}: {near(self.statistic, STATISTICS)}")
        if self.high <= 0 or (self.low is not None and not 0 < self.low <= self.high):
            raise ContractError(f"rejection keeps [{self.low}, {self.high}]: write 0 < low <= high")
        if self.low is not None and not self.statistic.endswith("k1"):
            raise ContractError(f"rejection by {self.statistic} has no lower bound: leave low out")

    def keeps(self, delta: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """(B, T) bool, from log-ratios ``delta`` (B, T) that are 0 outside the mask."""
        reduction, _, divergence = self.statistic.rpartition("_")
        if divergence == "k2":
            value = 0.5 * delta.square()
        elif divergence == "k3":
            value = _bounded(delta).exp() - 1 - delta
        else:
            value = delta
        if reduction == "seq_sum":
            value = masked_sum(value, response_mask, dim=-1).unsqueeze(-1)
        elif reduction == "seq_mean":
            value = masked_mean(value, response_mask, dim=-1).unsqueeze(-1)
        elif reduction == "seq_max":
            value = value.amax(dim=-1, keepdim=True)
        if divergence == "k1":
            ratio = _bounded(value).exp()
            kept = (ratio >= (1 / self.high if self.low is None else self.low)) & (ratio <= self.high)
        else:
            kept = value <= self.high
        return kept.expand_as(delta)


@dataclass(frozen=True)
class RolloutCorrection:
    """``weights`` (B, T) or None, ``response_mask`` (B, T) bool without what was rejected, and ``metrics``.

    ``weight_*`` describe the weights over the trained tokens before normalisation, ``weight_ess`` their effective
    sample size as a fraction; ``above`` and ``below`` are the fractions of ratios (of tokens or sequences) outside
    ``[floor or 1 / cap, cap]``;
    ``rejected`` and ``rejected_sequences`` the fractions of trained tokens and of sequences (with trained tokens) that
    lost at least one. The others as in ``correction.mismatch_metrics``.
    """

    weights: torch.Tensor | None
    response_mask: torch.Tensor
    metrics: dict[str, float]


def correct_rollout(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    weighting: Weighting | None = None,
    rejections: Sequence[Rejection] = (),
) -> RolloutCorrection:
    """Weights and the mask that is left, for a partition; all inputs (B, T).

    Every rejection judges the mask as given, so their order does not matter. Raises ``ContractError`` for a partition
    without trained tokens, whose statistics do not exist: skip its update.
    """
    if not bool(response_mask.any()):
        raise ContractError("no trained token in the partition: there is nothing to correct, skip the update")
    delta = log_ratio(old_logprobs.detach(), rollout_logprobs.detach(), response_mask, FINITE_LIMIT)
    metrics = mismatch_metrics(delta, response_mask)
    weights = None
    if weighting is not None:
        weights, of_weights = _weigh(delta, response_mask, weighting)
        metrics |= of_weights
    kept = response_mask
    for rejection in rejections:
        kept = kept & rejection.keeps(delta, response_mask)
    lost = response_mask & ~kept
    metrics["rejected"] = _fraction(lost, response_mask)
    metrics["rejected_sequences"] = _fraction(lost.any(dim=-1), response_mask.any(dim=-1))
    return RolloutCorrection(weights, kept, metrics)


def _weigh(
    delta: torch.Tensor, response_mask: torch.Tensor, weighting: Weighting
) -> tuple[torch.Tensor, dict[str, float]]:
    """Weights (B, T), 0 outside the mask, and their metrics."""
    if weighting.level == Level.SEQUENCE:
        delta = select(delta.sum(dim=-1, keepdim=True).expand_as(delta), response_mask)
    ratio = _bounded(delta).exp()
    low = 1 / weighting.cap if weighting.floor is None else weighting.floor
    above, below = ratio > weighting.cap, ratio < low
    weights = ratio.clamp(max=weighting.cap) if weighting.floor is None else torch.where(above | below, 0.0, ratio)
    weights = select(weights, response_mask)
    chosen = weights[response_mask].double()
    mean, second = chosen.mean(), chosen.square().mean()
    metrics = {
        "weight_mean": float(mean),
        "weight_std": float((second - mean.square()).clamp(min=0).sqrt()),
        "weight_max": float(chosen.max()),
        "weight_min": float(chosen.min()),
        "weight_ess": float(mean.square() / second) if second > 0 else 0.0,
        "above": _fraction(*_once_each(above, response_mask, weighting)),
        "below": _fraction(*_once_each(below, response_mask, weighting)),
    }
    if weighting.normalize:
        typical = masked_mean(*_once_each(weights, response_mask, weighting))
        weights = weights / torch.where(typical > 0, typical, torch.ones_like(typical))
    return weights, metrics


def _once_each(
    values: torch.Tensor, response_mask: torch.Tensor, weighting: Weighting
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token values (B, T) and their mask or, where a sequence has one value, that value (B,) and its mask."""
    if weighting.level == Level.TOKEN:
        return values, response_mask
    return select(values, response_mask).amax(dim=-1), response_mask.any(dim=-1)


def _bounded(delta: torch.Tensor) -> torch.Tensor:
    return delta.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _fraction(chosen: torch.Tensor, of: torch.Tensor) -> float:
    return float(masked_mean(chosen.double(), of))
