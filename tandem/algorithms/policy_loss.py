"""Policy losses: per-token terms, not yet summed.

A loss is ``(columns..., *, parameters) -> PolicyLoss``. It returns one term per token and leaves the summing to
``tandem.algorithms.reduce``, so that a batch may be cut into micro-batches without changing the result. Masked
entries of every input are replaced before any arithmetic and give the term 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeFloat

from tandem.algorithms.masked import select
from tandem.algorithms.metric import Metric
from tandem.base.errors import ContractError
from tandem.base.lazy import LazyModule
from tandem.base.registry import Registry, Scope

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this range before exp: e^20 is far outside every clip range."""

FINITE_LIMIT = 80.0
"""The wider range for losses that are defined without a clamp: e^80 is still finite in float32."""


@dataclass(frozen=True)
class PolicyLoss:
    """``per_token`` (B, T): the terms to minimise, 0 outside the mask; ``metrics``: sums with counts."""

    per_token: torch.Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)


DualClip = Annotated[
    float, Field(gt=1, description="it bounds the loss at this multiple of the advantage; null: no dual clip")
]

POLICY_LOSSES: Registry[Callable[..., PolicyLoss]] = Registry("policy loss")


@dataclass(frozen=True)
class ClipRange:
    """The ratio may lie in ``[1 - low, 1 + high]``."""

    low: float
    high: float

    @classmethod
    def of(cls, clip_ratio: float, low: float | None, high: float | None) -> ClipRange:
        """Return ``clip_ratio`` on both sides, except where a side is given."""
        chosen = cls(clip_ratio if low is None else low, clip_ratio if high is None else high)
        if chosen.low < 0 or chosen.high < 0:
            raise ContractError(f"clip range low={chosen.low} high={chosen.high}: write numbers that are not negative")
        return chosen

    def apply(self, ratio: torch.Tensor) -> torch.Tensor:
        """Return ``ratio`` clipped to the range."""
        return ratio.clamp(1 - self.low, 1 + self.high)


def log_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, response_mask: torch.Tensor, limit: float = LOG_RATIO_LIMIT
) -> torch.Tensor:
    """Return ``log(pi / pi_old)`` per token (B, T), 0 outside the mask, clamped to +-``limit``."""
    return (select(logprobs, response_mask) - select(old_logprobs, response_mask)).clamp(-limit, limit)


def weighted(per_token: torch.Tensor, weights: torch.Tensor | None, response_mask: torch.Tensor) -> torch.Tensor:
    """Return the terms times their importance weights (B, T) where there are any."""
    return per_token if weights is None else per_token * select(weights, response_mask)


@POLICY_LOSSES.register(
    "ppo_clip",
    scope=Scope.TOKEN,
    use_when="the default; with `clip_ratio_high` above `clip_ratio_low` against entropy collapse (DAPO)",
)
def ppo_clip(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    tis_weights: torch.Tensor | None = None,
    *,
    clip_ratio: NonNegativeFloat = 0.2,
    clip_ratio_low: NonNegativeFloat | None = None,
    clip_ratio_high: NonNegativeFloat | None = None,
    clip_ratio_c: DualClip | None = 3.0,
) -> PolicyLoss:
    """Return PPO's clipped surrogate (arXiv 1707.06347, equation 7) with the dual clip of arXiv 1912.09729.

    ``max(-A r, -A clip(r, 1 - low, 1 + high))``, and for A < 0 at most ``-A c``. ``clip_ratio`` sets both sides unless
    ``clip_ratio_low`` or ``clip_ratio_high`` is given (DAPO's "clip higher"); ``clip_ratio_c`` null turns the dual clip
    off. All inputs (B, T). Metrics: ``clipfrac`` and ``clipfrac_lower``, the fractions of tokens where the clip and the
    dual clip are active, and ``ppo_kl``, the k1 estimate of KL(old || current).

    >>> logprobs, old = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.4, 0.4]]).log()
    >>> mask = torch.tensor([[True, True]])
    >>> result = ppo_clip(logprobs, old, torch.tensor([[1.0, -1.0]]), mask, clip_ratio=0.2)
    >>> result.per_token
    tensor([[-1.2000,  0.8000]])
    """
    if clip_ratio_c is not None and clip_ratio_c <= 1.0:
        raise ContractError(f"clip_ratio_c = {clip_ratio_c}: the dual clip needs a bound above 1, or null for none")
    clip = ClipRange.of(clip_ratio, clip_ratio_low, clip_ratio_high)
    delta = log_ratio(logprobs, old_logprobs, response_mask)
    advantages = select(advantages, response_mask)
    ratio = delta.exp()
    unclipped, clipped = -advantages * ratio, -advantages * clip.apply(ratio)
    per_token = torch.maximum(unclipped, clipped)
    clip_active, dual_active = clipped > unclipped, torch.zeros_like(response_mask)
    if clip_ratio_c is not None:
        bound = -advantages * clip_ratio_c
        dual_active = (advantages < 0) & (per_token > bound)
        per_token = torch.where(advantages < 0, torch.minimum(per_token, bound), per_token)
    metrics = {
        "clipfrac": Metric.over(clip_active.float(), response_mask),
        "clipfrac_lower": Metric.over(dual_active.float(), response_mask),
        "ppo_kl": Metric.over(-delta, response_mask),
    }
    return PolicyLoss(weighted(per_token, tis_weights, response_mask), metrics)
