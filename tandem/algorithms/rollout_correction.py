"""Correction for the gap between the policy that sampled and the trainer's at the start of a step.

The engine's numerics, and under staleness its weights, differ from the trainer's. The ratio ``pi_old / pi_rollout``
re-weights samples, of a token or of a whole answer, truncated or zeroed outside a band; what drifted too far is left
out altogether. The mask that comes back is final: loss counts are to be taken from it, not from the one before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, get_args

from tandem.algorithms.masked import masked_mean, masked_sum, select
from tandem.algorithms.policy_loss import FINITE_LIMIT, LOG_RATIO_LIMIT, log_ratio
from tandem.base.errors import ContractError
from tandem.base.lazy import LazyModule
from tandem.base.registry import Scope, near
from tandem.config.correction import RolloutCorrectionConfig, Statistic

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

QUANTILES = (0.01, 0.5, 0.99)
STATISTICS: tuple[str, ...] = get_args(Statistic)


class Level(StrEnum):
    """Whether a weight belongs to a token or, as the product of its tokens' ratios, to a sequence."""

    TOKEN = "token"
    SEQUENCE = "sequence"


@dataclass(frozen=True)
class Weighting:
    """How ratios ``pi_old / pi_rollout`` become weights.

    Without ``floor`` they are truncated at ``cap``: truncated importance sampling (Ionides, 2008; between engine and
    trainer Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL training"; V-trace, arXiv
    1802.01561). With it, weights outside ``[floor, cap]`` are 0 (IcePop). ``normalize`` divides by the mean weight of
    the partition.
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

    @property
    def scope(self) -> Scope:
        """The set of samples that must be seen at once."""
        if self.normalize:
            return Scope.PARTITION
        return Scope.SEQUENCE if self.level == Level.SEQUENCE else Scope.TOKEN


@dataclass(frozen=True)
class Rejection:
    """Leave out what drifted: tokens by ``token_*``, whole sequences by the sum, mean or extreme over their tokens.

    ``k1`` looks at the ratio old / rollout (a sequence's: exp of the sum or mean of its log-ratios) and keeps
    ``[low, high]``, where ``low`` defaults to 1 / high. ``k2`` = (log r)^2 / 2 and ``k3`` = r - 1 - log r keep up to
    ``high``. ``seq_min_k1`` is the smallest ratio of a sequence and keeps what is at least ``low``. With ``quantile``
    instead of bounds that part of the partition's tokens or sequences is kept which drifted least (nearest rank; of k1
    the distance of the log-ratio from 0 counts).
    """

    statistic: str
    high: float | None = None
    low: float | None = None
    quantile: float | None = None

    def __post_init__(self) -> None:
        name, high, low, quantile = self.statistic, self.high, self.low, self.quantile
        if name not in STATISTICS:
            raise ContractError(f"rejection by {name!r}: {near(name, STATISTICS)}")
        if quantile is not None:
            if high is not None or low is not None or not 0 < quantile < 1:
                raise ContractError(f"rejection by {name} of quantile {quantile}: write 0 < quantile < 1 and no bounds")
        elif name == "seq_min_k1":
            if high is not None or low is None or low <= 0:
                raise ContractError(f"rejection by {name} keeps [{low}, {high}]: write low above 0, and no high")
        elif high is None or high <= 0 or (low is not None and not 0 < low <= high):
            raise ContractError(f"rejection keeps [{low}, {high}]: write 0 < low <= high")
        elif low is not None and not name.endswith("k1"):
            raise ContractError(f"rejection by {name} has no lower bound: leave low out")

    @property
    def scope(self) -> Scope:
        """The set of samples that must be seen at once."""
        if self.quantile is not None:
            return Scope.PARTITION
        return Scope.TOKEN if self.of_tokens else Scope.SEQUENCE

    @property
    def of_tokens(self) -> bool:
        """Whether tokens are judged one by one."""
        return self.statistic.startswith("token")

    def keeps(self, delta: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """Return (B, T) bool, from log-ratios ``delta`` (B, T) that are 0 outside the mask."""
        value, high = self._value(delta, response_mask), math.inf if self.high is None else self.high
        if self.quantile is not None:
            drift = value.abs()
            population = drift[response_mask] if self.of_tokens else drift[response_mask.any(dim=-1)]
            ordered = population.flatten().sort().values
            kept = drift <= ordered[max(0, math.ceil(self.quantile * len(ordered)) - 1)]
        elif self.statistic.endswith("k1"):
            ratio = _bounded(value).exp()
            kept = (ratio >= (1 / high if self.low is None else self.low)) & (ratio <= high)
        else:
            kept = value <= high
        return kept.expand_as(delta)

    def _value(self, delta: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """Return the statistic: (B, T) of tokens, (B, 1) of sequences."""
        reduction, _, divergence = self.statistic.rpartition("_")
        value = delta
        if divergence == "k2":
            value = 0.5 * delta.square()
        elif divergence == "k3":
            value = _bounded(delta).exp() - 1 - delta
        if reduction == "seq_sum":
            return masked_sum(value, response_mask, dim=-1).unsqueeze(-1)
        if reduction == "seq_mean":
            return masked_mean(value, response_mask, dim=-1).unsqueeze(-1)
        if reduction == "seq_max":
            return _largest(value, response_mask)
        if reduction == "seq_min":
            return -_largest(-value, response_mask)
        return value


@dataclass(frozen=True)
class CorrectionRules:
    """The weighting and the rejections that a config asks for."""

    weighting: Weighting | None = None
    rejections: tuple[Rejection, ...] = ()

    @classmethod
    def of(cls, config: RolloutCorrectionConfig) -> CorrectionRules:
        """Return the rules of a config. Raises ``ContractError`` for bounds that contradict each other."""
        weighting = None
        if config.weights != "off":
            weighting = Weighting(config.weights, config.cap, config.floor, config.normalize)
        rejections = [Rejection(rule.by, rule.high, rule.low, rule.quantile) for rule in config.reject]
        if config.veto is not None:
            rejections.append(Rejection("seq_min_k1", low=config.veto))
        return cls(weighting, tuple(rejections))

    @property
    def scope(self) -> Scope:
        """The widest set of samples that one of the rules must see at once."""
        weighting = Scope.TOKEN if self.weighting is None else self.weighting.scope
        return max([weighting, *(rejection.scope for rejection in self.rejections)])


@dataclass(frozen=True)
class RolloutCorrection:
    """``weights`` (B, T) or None, ``response_mask`` (B, T) bool without what was rejected, and ``metrics``.

    ``weight_*`` describe the weights over the trained tokens before normalisation, ``weight_ess`` their effective
    sample size as a fraction; ``above`` and ``below`` are the fractions of ratios (of tokens or sequences) outside
    ``[floor or 1 / cap, cap]``; ``rejected`` and ``rejected_sequences`` the fractions of trained tokens and of
    sequences (with trained tokens) that lost at least one. The others as in ``mismatch_metrics``.
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
    """Return the weights and the mask that is left, for a partition; all inputs (B, T). Detached.

    Every rejection judges the mask as given, so their order does not matter. Raises ``ContractError`` for a partition
    without trained tokens, whose statistics do not exist: skip its update.

    >>> old, rollout = torch.tensor([[0.4, 0.9]]).log(), torch.tensor([[0.5, 0.1]]).log()
    >>> mask, rules = torch.tensor([[True, True]]), [Rejection("token_k1", high=4.0)]
    >>> result = correct_rollout(old, rollout, mask, weighting=Weighting(cap=2.0), rejections=rules)
    >>> result.weights, result.response_mask
    (tensor([[0.8000, 2.0000]]), tensor([[ True, False]]))
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
    metrics["rejected"] = _mean(lost, response_mask)
    metrics["rejected_sequences"] = _mean(lost.any(dim=-1), response_mask.any(dim=-1))
    return RolloutCorrection(weights, kept, metrics)


def mismatch_metrics(delta: torch.Tensor, response_mask: torch.Tensor) -> dict[str, float]:
    """Return the statistics of ``delta = log(pi_old / pi_rollout)`` (B, T) over the trained tokens; all 0 where there
    are none.

    ``mismatch_kl`` and ``mismatch_k3`` estimate KL(rollout || old) per token; ``ratio_q*`` and ``ratio_max`` are
    quantiles of ``old / rollout``.
    """
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


def _weigh(
    delta: torch.Tensor, response_mask: torch.Tensor, weighting: Weighting
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the weights (B, T), 0 outside the mask, and their metrics."""
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
        "above": _mean(*_once_each(above, response_mask, weighting)),
        "below": _mean(*_once_each(below, response_mask, weighting)),
    }
    if weighting.normalize:
        typical = masked_mean(*_once_each(weights, response_mask, weighting))
        weights = weights / torch.where(typical > 0, typical, torch.ones_like(typical))
    return weights, metrics


def _once_each(
    values: torch.Tensor, response_mask: torch.Tensor, weighting: Weighting
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return per-token values (B, T) and their mask or, where a sequence has one value, that value (B,) and its
    mask.
    """
    if weighting.level == Level.TOKEN:
        return values, response_mask
    return select(values, response_mask).amax(dim=-1), response_mask.any(dim=-1)


def _largest(value: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return the largest value (B, 1) over the trained tokens of each sequence; 0 for one without any."""
    largest = select(value, response_mask, fill=-math.inf).amax(dim=-1, keepdim=True)
    return torch.where(response_mask.any(dim=-1, keepdim=True), largest, 0.0)


def _bounded(delta: torch.Tensor) -> torch.Tensor:
    return delta.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _mean(chosen: torch.Tensor, of: torch.Tensor) -> float:
    return float(masked_mean(chosen.double(), of))
