"""KL to the reference policy: estimators, the KL in the reward, and the controllers of its coefficient.

An estimator takes log-probs of the sampled tokens under the policy and the reference (both (B, T)) and returns one
estimate per token. As a loss term it is *added* with a positive coefficient; in the reward it is subtracted. The trait
``for_reward=True`` means that as a loss term its gradient vanishes on average; the plan notes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tandem.algorithms.masked import masked_mean, select
from tandem.algorithms.metric import Metric
from tandem.base.errors import ContractError
from tandem.base.lazy import LazyModule
from tandem.base.registry import Registry, Scope

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

Estimator: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"

KL_TYPES: Registry[Estimator] = Registry("kl type")

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0


@KL_TYPES.register("k1", scope=Scope.TOKEN, for_reward=True, use_when="in the reward: the plain estimate")
@KL_TYPES.register("kl", scope=Scope.TOKEN, for_reward=True, use_when="another name of `k1`")
def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return ``log(pi / ref)``: unbiased, high variance; its gradient as a loss has mean 0, so use it in the reward."""
    return logprobs - ref_logprobs


@KL_TYPES.register("abs", scope=Scope.TOKEN, use_when="in the reward: a deviation costs in either direction")
def absolute(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return ``|log(pi / ref)|``: a deviation costs in either direction; biased."""
    return (logprobs - ref_logprobs).abs()


@KL_TYPES.register("k2", scope=Scope.TOKEN, use_when="in the loss: the gradient that is right on average")
@KL_TYPES.register("mse", scope=Scope.TOKEN, use_when="another name of `k2`")
def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return ``log(pi / ref)^2 / 2``: biased value, but its gradient is an unbiased gradient of the KL.

    Schulman, "Approximating KL divergence" (2020).
    """
    return 0.5 * (logprobs - ref_logprobs).square()


@KL_TYPES.register("k3", scope=Scope.TOKEN, use_when="the default: GRPO's, steady in small batches")
@KL_TYPES.register("low_var_kl", scope=Scope.TOKEN, use_when="another name of `k3`")
def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return ``ref/pi - 1 - log(ref/pi)``: unbiased, low variance, never negative.

    Schulman, "Approximating KL divergence" (2020); used by GRPO (arXiv 2402.03300, equation 4). The log-ratio is
    clamped to +-20 and the estimate to +-10, so that one absurd token can't own the gradient.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (log_ratio.exp() - log_ratio - 1).clamp(-K3_LIMIT, K3_LIMIT)


def _with_gradient_of_k2(estimator: Estimator) -> Estimator:
    """Return the value of ``estimator``, gradient of k2: the estimate of one's choice with an unbiased gradient."""

    def straight_through(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
        surrogate = k2(logprobs, ref_logprobs)
        return surrogate - surrogate.detach() + estimator(logprobs, ref_logprobs).detach()

    straight_through.__doc__ = f"Value of ``{estimator.__name__}``, gradient of k2, which is unbiased for the KL."
    return straight_through


for _name in KL_TYPES.names():
    KL_TYPES.register(
        f"{_name}+", scope=Scope.TOKEN, use_when=f"in the loss: `{_name}` is reported, the gradient of `k2` followed"
    )(_with_gradient_of_k2(KL_TYPES[_name].target))


def kl_per_token(
    kind: str, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """Return the estimate ``kind`` for each trained token, 0 elsewhere: (B, T), with a gradient to ``logprobs``.

    >>> logprobs, ref, mask = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.0]]), torch.tensor([[True, True]])
    >>> kl_per_token("k1", logprobs, ref, mask)
    tensor([[0.5000, 0.0000]])
    """
    estimator = KL_TYPES[kind].target
    return estimator(select(logprobs, response_mask), select(ref_logprobs, response_mask))


@dataclass(frozen=True)
class PenalisedRewards:
    """``token_rewards`` (B, T) with the KL subtracted, and ``kl``: the mean per-sequence KL, for the controller."""

    token_rewards: torch.Tensor
    kl: Metric


def kl_in_reward(
    token_rewards: torch.Tensor,
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    kind: str,
    coef: float,
) -> PenalisedRewards:
    """Return ``r_t - coef * kl_t`` on the trained tokens (InstructGPT, arXiv 2203.02155, equation 2); all inputs (B,
    T).

    >>> rewards, mask = torch.tensor([[0.0, 1.0]]), torch.tensor([[True, True]])
    >>> logprobs, ref = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.0]])
    >>> kl_in_reward(rewards, logprobs, ref, mask, kind="k1", coef=0.1).token_rewards
    tensor([[-0.0500,  1.0000]])
    """
    per_token = kl_per_token(kind, logprobs.detach(), ref_logprobs, response_mask)
    per_sequence = masked_mean(per_token, response_mask, dim=-1)
    return PenalisedRewards(token_rewards - coef * per_token, Metric.over(per_sequence, response_mask.any(dim=-1)))


class KLController(Protocol):
    """The coefficient of the KL; constant within a partition, updated after it. ``FixedKL`` never changes it,
    ``AdaptiveKL`` steers the KL.
    """

    coef: float

    def update(self, kl: float, samples: int) -> None:
        """Learn from the mean ``kl`` of a partition of ``samples`` samples."""

    def state_dict(self) -> dict[str, float]:
        """Return the state that a checkpoint keeps."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with the state of a checkpoint."""


KL_CONTROLLERS: Registry[Callable[..., KLController]] = Registry("kl controller")


@KL_CONTROLLERS.register(
    "fixed",
    scope=Scope.TOKEN,
    use_when="the default",
)
class FixedKL:
    """A coefficient that stays as the config says."""

    def __init__(self, *, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, samples: int) -> None:
        """Do nothing: there is nothing to learn for a constant."""

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient, for the record alone."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Ignore ``state``: a constant comes from the config, so that a resumed run can be given another one."""


@KL_CONTROLLERS.register(
    "adaptive",
    scope=Scope.PARTITION,
    use_when="the KL in the reward is to stay near a target over a long run",
)
class AdaptiveKL:
    """A coefficient that steers the KL towards ``target`` (Ziegler et al., arXiv 1909.08593, section 2.2).

    ``coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon``.
    """

    def __init__(self, *, coef: float, target: float, horizon: float) -> None:
        if horizon <= 0:
            raise ContractError(f"kl horizon = {horizon}: write a positive number of samples, such as 10000")
        if target <= 0:
            raise ContractError(f"kl target = {target}: write the positive KL to be held")
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, samples: int) -> None:
        """Raise the coefficient when ``kl`` is above the target, lower it when below."""
        if not math.isfinite(kl):
            raise ContractError(f"the KL of a partition is {kl}: find the log-prob that is not finite")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient that was reached so far."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with the coefficient of the checkpoint."""
        self.coef = state["coef"]
