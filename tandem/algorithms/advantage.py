"""Advantage estimators.

An estimator is ``(columns..., *, parameters) -> (advantages, returns)``, both (B, T) float and 0 outside
``response_mask``. Token rewards outside the mask are ignored. Estimators that compare samples of a group do so by
``group_ids``; a sample without a trained token, or whose reward failed, changes nobody's statistics and gets 0, and so
does a sample that is left without a peer.

Traits: ``group_baseline=True`` means that more than one sample per prompt is needed; the plan refuses it with n = 1.
``token_level=True`` means that a reward counts where it is given; without it the plan refuses stages that give some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from pydantic import PositiveFloat

from tandem.algorithms.groups import Groups, countable
from tandem.algorithms.masked import masked_sum, masked_whiten, select
from tandem.base.lazy import LazyModule
from tandem.base.ranges import Fraction
from tandem.base.registry import Registry, Scope

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

Advantages: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"

ADVANTAGES: Registry[Callable[..., Advantages]] = Registry("advantage estimator")


def scores_of(token_rewards: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return (B,) float64: the sum of each sample's rewards on trained tokens, exact also beside a large common
    offset.
    """
    return masked_sum(token_rewards.double(), response_mask, dim=-1)


def per_token(scores: torch.Tensor, response_mask: torch.Tensor, like: torch.Tensor) -> Advantages:
    """Lay one value per sample (B,) on each of its trained tokens: advantages, and the same as returns."""
    spread = select(scores.to(like.dtype).unsqueeze(-1).expand(response_mask.shape), response_mask)
    return spread, spread


def in_dtype_of(like: torch.Tensor, advantages: torch.Tensor, returns: torch.Tensor) -> Advantages:
    """Return what was computed in float64, as the columns are kept."""
    return advantages.to(like.dtype), returns.to(like.dtype)


def whiten_partition(values: torch.Tensor, counted: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return ``masked_whiten`` over the tokens of the partition that count; 0 where fewer than two are left of more.

    Raises ``ContractError`` where the one token that counts is the only trained one: no failed reward made it so, and a
    silent 0 would train nothing step after step.
    """
    left = int(counted.sum())
    if left == 0 or left == 1 < int(response_mask.sum()):
        return torch.zeros_like(values)
    return masked_whiten(values, counted)


def reward_to_go(rewards: torch.Tensor, response_mask: torch.Tensor, discount: float) -> torch.Tensor:
    """Return the discounted sum of the rewards from each trained token on: (B, T) float64, 0 outside the mask.

    Tokens that are not trained (tool results between turns) are skipped: the sum passes over them unchanged and they
    cost no discount.
    """
    exact = rewards.double()
    running = torch.zeros_like(exact[:, 0])
    columns = []
    for t in range(rewards.shape[1] - 1, -1, -1):
        running = torch.where(response_mask[:, t], exact[:, t] + discount * running, running)
        columns.append(running)
    return select(torch.stack(columns[::-1], dim=1), response_mask)


@ADVANTAGES.register(
    "grpo",
    scope=Scope.GROUP,
    group_baseline=True,
    use_when="the default: several samples per prompt, a verifiable reward",
)
def grpo(
    token_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    group_ids: torch.Tensor,
    reward_valid: torch.Tensor | None = None,
    *,
    norm_adv_by_std: bool = True,
    epsilon: PositiveFloat = 1e-6,
) -> Advantages:
    """Return the score minus the group's mean, divided by the group's standard deviation plus epsilon.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2; without ``norm_adv_by_std`` that of Dr. GRPO (arXiv 2503.20783).

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    >>> mask = torch.ones(3, 2, dtype=torch.bool)
    >>> advantages, returns = grpo(rewards, mask, group_ids=torch.tensor([7, 7, 7]))
    >>> advantages[:, -1]
    tensor([ 0.5773, -1.1547,  0.5773])
    """
    scores = scores_of(token_rewards, response_mask)
    groups = Groups.of(group_ids, countable(token_rewards, response_mask, reward_valid))
    advantages = groups.deviation(scores)
    if norm_adv_by_std:
        advantages = advantages / (groups.std(scores)[groups.slot] + epsilon)
    return per_token(torch.where(groups.comparable, advantages, 0.0), response_mask, token_rewards)


@ADVANTAGES.register(
    "dr_grpo",
    scope=Scope.GROUP,
    group_baseline=True,
    use_when="very easy and very hard prompts would count too much, since grpo divides by their small spread",
)
def dr_grpo(
    token_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    group_ids: torch.Tensor,
    reward_valid: torch.Tensor | None = None,
) -> Advantages:
    """Return the score minus the group's mean, not divided by its spread: "GRPO done right" (arXiv 2503.20783).

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    >>> mask = torch.ones(3, 2, dtype=torch.bool)
    >>> advantages, returns = dr_grpo(rewards, mask, group_ids=torch.tensor([7, 7, 7]))
    >>> advantages[:, -1]
    tensor([ 0.3333, -0.6667,  0.3333])
    """
    return grpo(token_rewards, response_mask, group_ids, reward_valid, norm_adv_by_std=False)


@ADVANTAGES.register(
    "rloo",
    scope=Scope.GROUP,
    group_baseline=True,
    use_when="few samples per prompt: its baseline is unbiased even for n = 2",
)
def rloo(
    token_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    group_ids: torch.Tensor,
    reward_valid: torch.Tensor | None = None,
) -> Advantages:
    """Return the score minus the mean score of the *other* samples of the group (leave one out; arXiv 2402.14740).

    Equal to n / (n - 1) times the deviation from the mean of all n.

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    >>> mask = torch.ones(3, 2, dtype=torch.bool)
    >>> advantages, returns = rloo(rewards, mask, group_ids=torch.tensor([7, 7, 7]))
    >>> advantages[:, -1]
    tensor([ 0.5000, -1.0000,  0.5000])
    """
    scores = scores_of(token_rewards, response_mask)
    groups = Groups.of(group_ids, countable(token_rewards, response_mask, reward_valid))
    leave_one_out = groups.size / (groups.size - 1).clamp(min=1)
    return per_token(groups.deviation(scores) * leave_one_out[groups.slot], response_mask, token_rewards)


@ADVANTAGES.register(
    "reinforce_plus_plus",
    scope=Scope.PARTITION,
    token_level=True,
    use_when="one sample per prompt and no critic, or a reward at each token",
)
def reinforce_plus_plus(
    token_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    reward_valid: torch.Tensor | None = None,
    *,
    gamma: Fraction = 1.0,
) -> Advantages:
    """Return the discounted reward-to-go, whitened over all trained tokens of the partition (arXiv 2501.03262).

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    >>> mask = torch.ones(3, 2, dtype=torch.bool)
    >>> advantages, returns = reinforce_plus_plus(rewards, mask, gamma=0.9)
    >>> advantages[:, -1]
    tensor([ 0.7443, -1.2857,  0.7443])
    """
    counted = response_mask & countable(token_rewards, response_mask, reward_valid).unsqueeze(-1)
    returns = reward_to_go(select(token_rewards, counted), counted, gamma)
    return in_dtype_of(token_rewards, whiten_partition(returns, counted, response_mask), returns)


@ADVANTAGES.register(
    "gae",
    scope=Scope.PARTITION,
    token_level=True,
    use_when="you can afford a critic: long answers, rewards in the middle, credit per token (PPO)",
)
def gae(
    token_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    values: torch.Tensor,
    reward_valid: torch.Tensor | None = None,
    *,
    gamma: Fraction = 1.0,
    lam: Fraction = 1.0,
) -> Advantages:
    """Return the advantages of generalised advantage estimation, whitened over the partition (arXiv 1506.02438,
    equation 16).

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}``, where t + 1 is the next *trained*
    token and the value after the last one is 0. Returns are ``A_t + V_t`` before whitening. A sample whose reward
    failed gets advantage 0 and its own values as returns, so that it teaches the critic nothing.

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    >>> mask = torch.ones(3, 2, dtype=torch.bool)
    >>> advantages, returns = gae(rewards, mask, values=torch.full((3, 2), 0.5), gamma=1.0, lam=0.95)
    >>> returns[:, -1]
    tensor([1., 0., 1.])
    """
    counted = response_mask & countable(token_rewards, response_mask, reward_valid).unsqueeze(-1)
    rewards, values = select(token_rewards, counted).double(), select(values, response_mask).double()
    next_value = torch.zeros_like(rewards[:, 0])
    running = torch.zeros_like(next_value)
    columns = []
    for t in range(rewards.shape[1] - 1, -1, -1):
        trained = counted[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(trained, delta + gamma * lam * running, running)
        next_value = torch.where(trained, values[:, t], next_value)
        columns.append(running)
    advantages = torch.stack(columns[::-1], dim=1)
    white = whiten_partition(advantages, counted, response_mask)
    return in_dtype_of(token_rewards, white, select(advantages + values, response_mask))
