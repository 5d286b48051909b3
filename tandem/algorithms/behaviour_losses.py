"""Policy losses for stale samples: they know the policy that sampled (``rollout_logprobs``, the behaviour).

Same contract as ``tandem.algorithms.policy_loss``, into whose registry they go. All inputs are (B, T).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import NonNegativeFloat, PositiveFloat

from tandem.algorithms.masked import select
from tandem.algorithms.metric import Metric
from tandem.algorithms.policy_loss import FINITE_LIMIT, POLICY_LOSSES, DualClip, PolicyLoss, log_ratio, ppo_clip
from tandem.base.errors import ContractError
from tandem.base.lazy import LazyModule
from tandem.base.registry import Scope

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


@POLICY_LOSSES.register(
    "decoupled_ppo",
    scope=Scope.TOKEN,
    use_when="max_staleness is 2 or more: the clip is around the policy of the step's start, not around the stale one",
)
def decoupled_ppo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_ratio: NonNegativeFloat = 0.2,
    clip_ratio_low: NonNegativeFloat | None = None,
    clip_ratio_high: NonNegativeFloat | None = None,
    clip_ratio_c: DualClip | None = None,
    behaviour_cap: PositiveFloat | None = 5.0,
) -> PolicyLoss:
    """Return ``w ppo_clip(pi / pi_prox)`` with the constant weight ``w = pi_prox / pi_behaviour`` of each token.

    Decoupled PPO (arXiv 2110.00641; for asynchronous training AReaL, arXiv 2505.24298): ``old_logprobs`` are proximal,
    of the weights at the start of the step, ``rollout_logprobs`` those of the policy that sampled, however old. Tokens
    whose weight is above ``behaviour_cap`` give no gradient (null: all do). Metrics: those of ``ppo_clip``, and
    ``behaviour_dropped``, the fraction of such tokens.

    >>> logprobs, old = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.4, 0.4]]).log()
    >>> mask = torch.tensor([[True, True]])
    >>> result = decoupled_ppo(logprobs, old, old - 0.1, torch.tensor([[1.0, -1.0]]), mask)
    >>> result.per_token
    tensor([[-1.3262,  0.8841]])
    """
    if behaviour_cap is not None and behaviour_cap <= 0:
        raise ContractError(f"behaviour_cap = {behaviour_cap}: write a positive bound of the weight, or null for none")
    proximal = ppo_clip(
        logprobs,
        old_logprobs,
        advantages,
        response_mask,
        clip_ratio=clip_ratio,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
    )
    weight = log_ratio(old_logprobs, rollout_logprobs, response_mask).detach().exp()
    dropped = torch.zeros_like(response_mask) if behaviour_cap is None else weight > behaviour_cap
    per_token = torch.where(dropped, 0.0, proximal.per_token * weight)
    metrics = proximal.metrics | {"behaviour_dropped": Metric.over(dropped.float(), response_mask)}
    return replace(proximal, per_token=per_token, metrics=metrics)


@POLICY_LOSSES.register(
    "m2po",
    scope=Scope.PARTITION,
    whole_mini_batch=True,
    use_when="very stale samples: a clip would silence the rare tokens that teach most, this only the few outliers",
)
def m2po(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    m2_threshold: PositiveFloat = 0.04,
) -> PolicyLoss:
    """Return ``-A r`` with r = pi / pi_behaviour, without the outliers that hold the mean of ``(log r)^2`` above a
    threshold.

    M2PO (arXiv 2510.01161). Looked at are the tokens that move away further: r > 1 with A > 0, r < 1 with A < 0. Of
    them those with the largest ``(log r)^2`` give no gradient, as many as it takes for the mean over the rest to be at
    most ``m2_threshold``; equal ones go together. Metrics: ``clipfrac`` (tokens silenced), ``m2`` (the mean before),
    ``ppo_kl`` (behaviour || current).

    >>> logprobs, old = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.4, 0.4]]).log()
    >>> mask = torch.tensor([[True, True]])
    >>> result = m2po(logprobs, old, torch.tensor([[1.0, -1.0]]), mask, m2_threshold=0.1)
    >>> result.per_token
    tensor([[-1.2500,  0.0000]])
    """
    if m2_threshold <= 0:
        raise ContractError(f"m2_threshold = {m2_threshold}: write a positive bound of the second moment, such as 0.04")
    delta = log_ratio(logprobs, rollout_logprobs, response_mask, FINITE_LIMIT)
    advantages = select(advantages, response_mask)
    squares = delta.detach().square()
    leaving = advantages * delta.detach() > 0  # neither factor is there outside the mask
    silenced = leaving & (squares > _trusted(squares[leaving], m2_threshold))
    per_token = torch.where(silenced, 0.0, -advantages * delta.exp())
    metrics = {
        "clipfrac": Metric.over(silenced.float(), response_mask),
        "m2": Metric.over(squares, leaving),
        "ppo_kl": Metric.over(-delta, response_mask),
    }
    return PolicyLoss(per_token, metrics)


def _trusted(squares: torch.Tensor, threshold: float) -> float:
    """Return the largest of the (N,) values up to which their mean is within the threshold; below all where none is."""
    values, counts = squares.double().unique(return_counts=True)
    means = (values * counts).cumsum(0) / counts.cumsum(0)
    trusted = values[means <= threshold]
    return float(trusted[-1]) if len(trusted) else -1.0
