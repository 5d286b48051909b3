"""Policy losses on the ratio of whole sequences, and on the covariance of advantage and log-prob.

Same contract as ``tandem.algorithms.policy_loss``, into whose registry they go. All inputs are (B, T).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import NonNegativeFloat, NonNegativeInt

from tandem.algorithms.masked import masked_mean, select
from tandem.algorithms.metric import Metric
from tandem.algorithms.policy_loss import FINITE_LIMIT, POLICY_LOSSES, ClipRange, PolicyLoss, log_ratio, weighted
from tandem.base.errors import ContractError
from tandem.base.lazy import LazyModule
from tandem.base.ranges import Fraction
from tandem.base.registry import Scope

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

LOG_SEQUENCE_RATIO_MAX = 10.0


@POLICY_LOSSES.register(
    "gspo",
    scope=Scope.SEQUENCE,
    use_when="one reward per answer, long answers, mixtures of experts: token ratios are noise",
)
def gspo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    tis_weights: torch.Tensor | None = None,
    *,
    clip_ratio: NonNegativeFloat = 0.2,
    clip_ratio_low: NonNegativeFloat | None = None,
    clip_ratio_high: NonNegativeFloat | None = None,
) -> PolicyLoss:
    """Return PPO's clip on the ratio of the sequence, the geometric mean of its tokens' (GSPO, arXiv 2507.18071,
    section 4.3).

    ``s_t = sg(s) pi_t / sg(pi_t)``: the value of the sequence's ratio, the gradient of each token. Meant for
    ``seq-mean-token-mean``. Metrics: ``clipfrac``, ``ppo_kl``.

    >>> logprobs, old = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.4, 0.4]]).log()
    >>> mask = torch.tensor([[True, True]])
    >>> result = gspo(logprobs, old, torch.tensor([[1.0, 1.0]]), mask, clip_ratio=0.2)
    >>> result.per_token
    tensor([[-0.7906, -0.7906]])
    """
    clip = ClipRange.of(clip_ratio, clip_ratio_low, clip_ratio_high)
    delta = log_ratio(logprobs, old_logprobs, response_mask, FINITE_LIMIT)
    now, advantages = select(logprobs, response_mask), select(advantages, response_mask)
    of_sequence = masked_mean(delta, response_mask, dim=-1).detach().unsqueeze(-1)
    ratio = (now - now.detach() + of_sequence).clamp(max=LOG_SEQUENCE_RATIO_MAX).exp()
    unclipped, clipped = -advantages * ratio, -advantages * clip.apply(ratio)
    metrics = {
        "clipfrac": Metric.over((clipped > unclipped).float(), response_mask),
        "ppo_kl": Metric.over(-delta, response_mask),
    }
    per_token = select(torch.maximum(unclipped, clipped), response_mask)
    return PolicyLoss(weighted(per_token, tis_weights, response_mask), metrics)


@POLICY_LOSSES.register(
    "geo_mean",
    scope=Scope.SEQUENCE,
    use_when="single outlying tokens dominate ppo_clip's mean: the geometric mean holds them down",
)
def geo_mean(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    tis_weights: torch.Tensor | None = None,
    *,
    clip_ratio: NonNegativeFloat = 0.2,
    clip_ratio_low: NonNegativeFloat | None = None,
    clip_ratio_high: NonNegativeFloat | None = None,
) -> PolicyLoss:
    """Return the negative of the mean advantage times the geometric mean of the clipped ratios (GMPO,
    arXiv 2507.20673).

    The clip acts on the log-ratio, on the side to which the advantage pushes. Every token carries its sequence's term,
    so that ``seq-mean-token-mean`` gives the mean over sequences. Metrics: ``clipfrac``, ``clipfrac_lower`` (tokens
    outside the range with A > 0 and with A < 0), ``ppo_kl``.

    >>> logprobs, old = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.4, 0.4]]).log()
    >>> mask = torch.tensor([[True, True]])
    >>> result = geo_mean(logprobs, old, torch.tensor([[1.0, 1.0]]), mask, clip_ratio=0.2)
    >>> result.per_token
    tensor([[-0.7815, -0.7815]])
    """
    clip = ClipRange.of(clip_ratio, clip_ratio_low, clip_ratio_high)
    delta = log_ratio(logprobs, old_logprobs, response_mask, FINITE_LIMIT)
    advantages = select(advantages, response_mask)
    sign = advantages.sign()
    pushed = sign * delta
    bounded = sign * torch.minimum(pushed, sign * delta.clamp(-clip.low, clip.high))
    ratio = masked_mean(bounded, response_mask, dim=-1).exp()
    of_sequence = -masked_mean(advantages, response_mask, dim=-1) * ratio
    if tis_weights is not None:
        weights = torch.where(response_mask, tis_weights, torch.ones_like(tis_weights))
        of_sequence = of_sequence * masked_mean(weights.log(), response_mask, dim=-1).exp()
    clipped = (delta < -clip.low) | (delta > clip.high)
    metrics = {
        "clipfrac": Metric.over((clipped & (advantages > 0)).float(), response_mask),
        "clipfrac_lower": Metric.over((clipped & (advantages < 0)).float(), response_mask),
        "ppo_kl": Metric.over(-delta, response_mask),
    }
    return PolicyLoss(select(of_sequence.unsqueeze(-1).expand_as(delta), response_mask), metrics)


def _covariance(logprobs: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return ``(A - mean A)(log pi - mean log pi)`` per token, without gradient: what moves the policy's entropy.

    The means are over all tokens given, so these losses want the whole mini-batch at once.
    """
    now, advantages = select(logprobs, response_mask).detach(), select(advantages, response_mask)
    return (advantages - masked_mean(advantages, response_mask)) * (now - masked_mean(now, response_mask))


@POLICY_LOSSES.register(
    "clip_cov",
    scope=Scope.PARTITION,
    whole_mini_batch=True,
    use_when="the entropy collapses early: a few tokens of high covariance are left out",
)
def clip_cov(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    tis_weights: torch.Tensor | None = None,
    *,
    clip_ratio: NonNegativeFloat = 0.2,
    clip_ratio_low: NonNegativeFloat | None = None,
    clip_ratio_high: NonNegativeFloat | None = None,
    clip_cov_ratio: Fraction = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    seed: NonNegativeInt = 0,
) -> PolicyLoss:
    """Return PPO's clip, and no gradient for a random few of the tokens whose covariance lies between ``lb`` and
    ``ub``.

    Clip-Cov (arXiv 2505.22617): a fraction ``clip_cov_ratio`` of the trained tokens, at least one, is drawn with
    ``seed``. Metrics: ``clipfrac`` (tokens silenced), ``ppo_kl``.

    >>> logprobs, old = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.4, 0.4]]).log()
    >>> mask = torch.tensor([[True, True]])
    >>> result = clip_cov(logprobs, old, torch.tensor([[1.0, -1.0]]), mask, clip_ratio=0.6, clip_cov_lb=0.1)
    >>> result.per_token
    tensor([[0.0000, 0.5000]])
    """
    clip = ClipRange.of(clip_ratio, clip_ratio_low, clip_ratio_high)
    delta = log_ratio(logprobs, old_logprobs, response_mask, FINITE_LIMIT)
    chosen = select(advantages, response_mask)
    ratio = delta.exp()
    unclipped, clipped = -chosen * ratio, -chosen * clip.apply(ratio)
    covariance = _covariance(logprobs, advantages, response_mask)
    candidate = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & response_mask & ~(clipped > unclipped)
    found = candidate.flatten().nonzero().flatten()
    wanted = max(int(clip_cov_ratio * int(response_mask.sum())), 1)
    drawn = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))[:wanted]
    silenced = torch.zeros_like(response_mask).flatten()
    silenced[found[drawn.to(found.device)]] = True
    silenced = silenced.reshape(response_mask.shape)
    per_token = torch.where(silenced, 0.0, torch.maximum(unclipped, clipped))
    metrics = {
        "clipfrac": Metric.over(silenced.float(), response_mask),
        "ppo_kl": Metric.over(-delta, response_mask),
    }
    return PolicyLoss(weighted(per_token, tis_weights, response_mask), metrics)


@POLICY_LOSSES.register(
    "kl_cov",
    scope=Scope.PARTITION,
    whole_mini_batch=True,
    use_when="as `clip_cov`, with a penalty instead of silence",
)
def kl_cov(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    tis_weights: torch.Tensor | None = None,
    *,
    kl_cov_ratio: Fraction = 0.0002,
    ppo_kl_coef: NonNegativeFloat = 1.0,
) -> PolicyLoss:
    """Return ``-A r``, plus ``ppo_kl_coef |log r|`` on the fraction ``kl_cov_ratio`` of tokens with the largest
    covariance.

    KL-Cov (arXiv 2505.22617). Metric: ``ppo_kl``, here the mean of ``|log r|``.

    >>> logprobs, old = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.4, 0.4]]).log()
    >>> mask = torch.tensor([[True, True]])
    >>> result = kl_cov(logprobs, old, torch.tensor([[1.0, -1.0]]), mask, kl_cov_ratio=0.5)
    >>> result.per_token
    tensor([[-1.0269,  0.5000]])
    """
    if not 0 <= kl_cov_ratio <= 1:
        raise ContractError(f"kl_cov_ratio = {kl_cov_ratio}: write a fraction of the tokens, 0 to 1")
    delta = log_ratio(logprobs, old_logprobs, response_mask, FINITE_LIMIT)
    per_token = -select(advantages, response_mask) * delta.exp()
    tokens = int(response_mask.sum())
    if kl_cov_ratio > 0 and tokens > 0:
        covariance = select(_covariance(logprobs, advantages, response_mask), response_mask, fill=-torch.inf)
        top = covariance.flatten().topk(max(1, int(tokens * kl_cov_ratio))).indices
        bound = torch.zeros_like(response_mask).flatten()
        bound[top] = True
        per_token = per_token + torch.where(bound.reshape(response_mask.shape), ppo_kl_coef * delta.abs(), 0.0)
    metrics = {"ppo_kl": Metric.over(delta.abs(), response_mask)}
    return PolicyLoss(weighted(per_token, tis_weights, response_mask), metrics)
