"""More policy losses on the token ratio ``r = pi / pi_old``: other ways to bound or weigh it than a clip.

Same contract as ``tandem.algorithms.policy_loss``, into whose registry they go. All inputs are (B, T).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from tandem.algorithms.masked import select
from tandem.algorithms.metric import Metric
from tandem.algorithms.policy_loss import POLICY_LOSSES, ClipRange, PolicyLoss, log_ratio, weighted
from tandem.base.errors import ContractError
from tandem.base.lazy import LazyModule
from tandem.base.registry import Scope

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


@POLICY_LOSSES.register(
    "gpg",
    scope=Scope.TOKEN,
    use_when="one optimizer step per partition and fresh samples: nothing needs a bound",
)
def gpg(
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    tis_weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """Return ``-A log pi``: the plain policy gradient, without a ratio or a bound (REINFORCE; GPG, arXiv 2504.02546).

    >>> logprobs = torch.tensor([[0.5, 0.2]]).log()
    >>> mask = torch.tensor([[True, True]])
    >>> result = gpg(logprobs, torch.tensor([[1.0, -1.0]]), mask)
    >>> result.per_token
    tensor([[ 0.6931, -1.6094]])
    """
    per_token = -select(advantages, response_mask) * select(logprobs, response_mask)
    return PolicyLoss(weighted(per_token, tis_weights, response_mask))


@POLICY_LOSSES.register(
    "cispo",
    scope=Scope.TOKEN,
    use_when='rare but decisive tokens ("wait", "however") must keep their gradient when the ratio is clipped',
)
def cispo(
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
    """Return ``-A sg(clip(r)) log pi``: the clip bounds a token's weight but never its gradient's direction.

    MiniMax-M1 (arXiv 2506.13585). Metrics: ``clipfrac`` (ratio outside the range), ``ppo_kl``.

    >>> logprobs, old = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.4, 0.4]]).log()
    >>> mask = torch.tensor([[True, True]])
    >>> result = cispo(logprobs, old, torch.tensor([[1.0, -1.0]]), mask, clip_ratio_high=0.1)
    >>> result.per_token
    tensor([[ 0.7625, -1.2876]])
    """
    clip = ClipRange.of(clip_ratio, clip_ratio_low, clip_ratio_high)
    delta = log_ratio(logprobs, old_logprobs, response_mask)
    ratio = delta.exp()
    clipped = clip.apply(ratio)
    per_token = -clipped.detach() * select(advantages, response_mask) * select(logprobs, response_mask)
    metrics = {
        "clipfrac": Metric.over((ratio != clipped).float(), response_mask),
        "ppo_kl": Metric.over(-delta, response_mask),
    }
    return PolicyLoss(weighted(per_token, tis_weights, response_mask), metrics)


WeightBound = Annotated[float, Field(gt=0, description="it bounds the ratio by which a token is weighed")]


def _inside_region(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    tis_weights: torch.Tensor | None,
    may_rise: torch.Tensor,
    may_fall: torch.Tensor,
    clip_ratio_c: float,
) -> PolicyLoss:
    """Return ``-A sg(min(r, c)) log pi`` on the tokens that may still move the way their advantage pushes."""
    if clip_ratio_c <= 0:
        raise ContractError(f"clip_ratio_c = {clip_ratio_c}: write a positive bound of the ratio, such as 3.0")
    delta = log_ratio(logprobs, old_logprobs, response_mask)
    advantages = select(advantages, response_mask)
    inside = torch.where(advantages > 0, may_rise, may_fall)
    ratio = delta.exp().detach()
    moved = -advantages * ratio.clamp(max=clip_ratio_c) * select(logprobs, response_mask)
    per_token = torch.where(inside, moved, moved.detach() * 0)
    metrics = {
        "clipfrac": Metric.over((~inside).float(), response_mask),
        "clipfrac_lower": Metric.over((inside & (ratio > clip_ratio_c)).float(), response_mask),
        "ppo_kl": Metric.over(-delta, response_mask),
    }
    return PolicyLoss(weighted(per_token, tis_weights, response_mask), metrics)


@POLICY_LOSSES.register(
    "dppo_tv",
    scope=Scope.TOKEN,
    use_when="a large vocabulary: the clip of a ratio is too tight for rare tokens and too loose for common ones",
)
def dppo_tv(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    tis_weights: torch.Tensor | None = None,
    *,
    clip_ratio: NonNegativeFloat = 0.2,
    clip_ratio_low: NonNegativeFloat | None = None,
    clip_ratio_high: NonNegativeFloat | None = None,
    clip_ratio_c: WeightBound = 3.0,
) -> PolicyLoss:
    """Return the policy gradient within a trust region of total variation, ``pi - pi_old`` of the sampled token.

    A token stops learning once its *probability* rose by more than high (A > 0) or fell by more than low. Unlike a clip
    of the ratio this lets rare tokens move. The weight r is at most ``clip_ratio_c``. Metrics: ``clipfrac`` (tokens
    outside the region), ``clipfrac_lower`` (inside, the weight bounded), ``ppo_kl``. DPPO (arXiv 2602.04879).

    >>> logprobs, old = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.4, 0.4]]).log()
    >>> mask = torch.tensor([[True, True]])
    >>> result = dppo_tv(logprobs, old, torch.tensor([[1.0, -1.0]]), mask, clip_ratio=0.15)
    >>> result.per_token
    tensor([[0.8664, -0.0000]])
    """
    bound = ClipRange.of(clip_ratio, clip_ratio_low, clip_ratio_high)
    change = select(logprobs, response_mask).exp() - select(old_logprobs, response_mask).exp()
    rise, fall = change <= bound.high, change >= -bound.low
    return _inside_region(logprobs, old_logprobs, advantages, response_mask, tis_weights, rise, fall, clip_ratio_c)


@POLICY_LOSSES.register(
    "dppo_kl",
    scope=Scope.TOKEN,
    use_when="as `dppo_tv`, where the bound is to be given in nats",
)
def dppo_kl(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    tis_weights: torch.Tensor | None = None,
    *,
    clip_ratio: NonNegativeFloat = 0.2,
    clip_ratio_low: NonNegativeFloat | None = None,
    clip_ratio_high: NonNegativeFloat | None = None,
    clip_ratio_c: WeightBound = 3.0,
    epsilon: PositiveFloat = 1e-8,
) -> PolicyLoss:
    """Return the loss of ``dppo_tv`` with the KL of the two-outcome distribution (the sampled token, any other) as the
    distance.

    ``KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))`` (arXiv 2602.04879).

    >>> logprobs, old = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.4, 0.4]]).log()
    >>> mask = torch.tensor([[True, True]])
    >>> result = dppo_kl(logprobs, old, torch.tensor([[1.0, -1.0]]), mask, clip_ratio=0.05)
    >>> result.per_token
    tensor([[0.8664, -0.0000]])
    """
    bound = ClipRange.of(clip_ratio, clip_ratio_low, clip_ratio_high)
    now, before = select(logprobs, response_mask), select(old_logprobs, response_mask)
    p, p_old = now.exp(), before.exp()
    rest = (1 - p_old) * ((1 - p_old + epsilon) / (1 - p + epsilon)).log()
    distance = p_old * (before - now) + rest
    rise = (distance <= bound.high) | (p <= p_old)
    fall = (distance <= bound.low) | (p >= p_old)
    return _inside_region(logprobs, old_logprobs, advantages, response_mask, tis_weights, rise, fall, clip_ratio_c)


@POLICY_LOSSES.register(
    "sapo",
    scope=Scope.TOKEN,
    use_when="the hard edge of the clip makes training jump, above all with mixtures of experts",
)
def sapo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    tis_weights: torch.Tensor | None = None,
    *,
    tau_pos: PositiveFloat = 1.0,
    tau_neg: PositiveFloat = 1.05,
) -> PolicyLoss:
    """Return ``-A f(r)`` with the soft gate ``f(r) = 4 / tau sigmoid(tau (r - 1))``: a clip without an edge.

    Soft adaptive policy optimisation (arXiv 2511.20347); ``tau_pos`` for A > 0, else ``tau_neg``.
    The gradient at r = 1 is that of the plain ratio. Metric: ``ppo_kl``.

    >>> logprobs, old = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.4, 0.4]]).log()
    >>> mask = torch.tensor([[True, True]])
    >>> result = sapo(logprobs, old, torch.tensor([[1.0, -1.0]]), mask)
    >>> result.per_token
    tensor([[-2.2487,  1.4159]])
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ContractError(f"sapo tau_pos = {tau_pos}, tau_neg = {tau_neg}: write positive temperatures")
    delta = log_ratio(logprobs, old_logprobs, response_mask)
    advantages = select(advantages, response_mask)
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(delta.dtype)
    gate = torch.sigmoid(tau * (delta.exp() - 1)) * 4 / tau
    metrics = {"ppo_kl": Metric.over(-delta, response_mask)}
    return PolicyLoss(weighted(-gate * advantages, tis_weights, response_mask), metrics)


@POLICY_LOSSES.register(
    "dro",
    scope=Scope.TOKEN,
    use_when="off-policy data without importance ratios: a pull to the old policy instead of a clip",
)
def dro(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    tis_weights: torch.Tensor | None = None,
    *,
    dro_beta: PositiveFloat,
) -> PolicyLoss:
    """Return ``-A log pi + beta / 2 (log r)^2``: policy gradient with a quadratic pull to the old policy
    (arXiv 2405.19107).

    Metric: ``ppo_kl``.

    >>> logprobs, old = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.4, 0.4]]).log()
    >>> mask = torch.tensor([[True, True]])
    >>> result = dro(logprobs, old, torch.tensor([[1.0, -1.0]]), mask, dro_beta=0.5)
    >>> result.per_token
    tensor([[ 0.7056, -1.4893]])
    """
    if dro_beta <= 0:
        raise ContractError(f"dro_beta = {dro_beta}: write a positive strength of the pull to the old policy")
    now = select(logprobs, response_mask)
    delta = now - select(old_logprobs, response_mask)
    per_token = -select(advantages, response_mask) * now + 0.5 * dro_beta * delta.square()
    metrics = {"ppo_kl": Metric.over(-delta, response_mask)}
    return PolicyLoss(weighted(per_token, tis_weights, response_mask), metrics)
