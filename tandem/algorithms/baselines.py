"""More advantage estimators: other baselines for the score of a sample, and baselines per token.

Same contract as ``tandem.algorithms.advantage``, into whose registry they go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import PositiveFloat

from tandem.algorithms.advantage import (
    ADVANTAGES,
    Advantages,
    in_dtype_of,
    per_token,
    reward_to_go,
    scores_of,
    whiten_partition,
)
from tandem.algorithms.groups import Groups, countable
from tandem.algorithms.masked import select
from tandem.base.errors import ContractError
from tandem.base.lazy import LazyModule
from tandem.base.registry import Scope

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


@ADVANTAGES.register(
    "grpo_passk",
    scope=Scope.GROUP,
    group_baseline=True,
    use_when="pass@k is the measure: one good answer of the group is enough",
)
def grpo_passk(
    token_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    group_ids: torch.Tensor,
    reward_valid: torch.Tensor | None = None,
    *,
    norm_adv_by_std: bool = True,
    epsilon: PositiveFloat = 1e-6,
) -> Advantages:
    """Let only the best sample of a group learn, by its lead over the second best; for pass@k (arXiv 2503.19595).

    Divided by the group's standard deviation plus epsilon with ``norm_adv_by_std``. All others get 0.

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    >>> mask = torch.ones(3, 2, dtype=torch.bool)
    >>> advantages, returns = grpo_passk(rewards, mask, group_ids=torch.tensor([7, 7, 8]))
    >>> advantages[:, -1]
    tensor([1.4142, 0.0000, 0.0000])
    """
    scores = scores_of(token_rewards, response_mask)
    groups = Groups.of(group_ids, countable(token_rewards, response_mask, reward_valid))
    ranked = torch.where(groups.counted, scores, -torch.inf)
    order = ranked.argsort(stable=True)
    order = order[groups.slot[order].argsort(stable=True)]  # by group, ascending score within
    last = torch.bincount(groups.slot, minlength=len(groups.size)).cumsum(0) - 1
    last = last[groups.size >= 2]
    best, second = order[last], order[last - 1]
    advantages = torch.zeros_like(scores)
    advantages[best] = scores[best] - scores[second]
    if norm_adv_by_std:
        advantages = advantages / (groups.std(scores)[groups.slot] + epsilon)
    return per_token(advantages, response_mask, token_rewards)


def of_compared(
    per_sample: torch.Tensor, compared: torch.Tensor, response_mask: torch.Tensor, like: torch.Tensor
) -> Advantages:
    """Return one value per sample on its ``compared`` (B, T) tokens, whitened over those of the partition."""
    spread, _ = per_token(per_sample, compared, per_sample)
    white = whiten_partition(spread, compared, response_mask)
    return in_dtype_of(like, white, white)


@ADVANTAGES.register(
    "reinforce_plus_plus_baseline",
    scope=Scope.PARTITION,
    group_baseline=True,
    use_when="groups are small and their own spread is too noisy to divide by",
)
def reinforce_plus_plus_baseline(
    token_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    group_ids: torch.Tensor,
    reward_valid: torch.Tensor | None = None,
) -> Advantages:
    """Return the score minus the group's mean, whitened over the trained tokens of the partition (arXiv 2501.03262).

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    >>> mask = torch.ones(3, 2, dtype=torch.bool)
    >>> advantages, returns = reinforce_plus_plus_baseline(rewards, mask, group_ids=torch.tensor([7, 7, 8]))
    >>> advantages[:, -1]
    tensor([ 0.8660, -0.8660,  0.0000])
    """
    scores = scores_of(token_rewards, response_mask)
    groups = Groups.of(group_ids, countable(token_rewards, response_mask, reward_valid))
    compared = response_mask & groups.comparable.unsqueeze(-1)
    return of_compared(groups.deviation(scores), compared, response_mask, token_rewards)


@ADVANTAGES.register(
    "gdpo",
    scope=Scope.PARTITION,
    group_baseline=True,
    use_when="several rewards of different scale, whose plain sum would follow the loudest one",
)
def gdpo(
    token_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    group_ids: torch.Tensor,
    reward_components: torch.Tensor,
    reward_valid: torch.Tensor | None = None,
    *,
    weights: Sequence[float] | None = None,
    epsilon: PositiveFloat = 1e-6,
) -> Advantages:
    """Return each of the K ``reward_components`` (B, K) normalised within its group, then added and whitened.

    So no component drowns another (GDPO, arXiv 2601.05242). ``weights`` of the sum default to 1; the whitening is over
    the partition.

    ``token_rewards`` only say which samples failed.

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    >>> mask = torch.ones(3, 2, dtype=torch.bool)
    >>> parts = torch.tensor([[1.0, 9.0], [0.0, 9.0], [1.0, 0.0]])
    >>> advantages, returns = gdpo(rewards, mask, torch.tensor([7, 7, 7]), reward_components=parts)
    >>> advantages[:, -1]
    tensor([ 1.2910, -0.6455, -0.6455])
    """
    parts = reward_components.shape[-1]
    chosen = [1.0] * parts if weights is None else list(weights)
    if len(chosen) != parts:
        raise ContractError(f"gdpo has {len(chosen)} weights for {parts} reward components: write one for each")
    counted = countable(token_rewards, response_mask, reward_valid) & reward_components.isfinite().all(dim=-1)
    groups = Groups.of(group_ids, counted)
    total = torch.zeros(len(counted), dtype=torch.float64, device=counted.device)
    for component, weight in zip(reward_components.unbind(-1), chosen, strict=True):
        total = total + weight * groups.deviation(component) / (groups.std(component)[groups.slot] + epsilon)
    compared = response_mask & groups.comparable.unsqueeze(-1)
    return of_compared(total, compared, response_mask, token_rewards)


@ADVANTAGES.register(
    "remax",
    scope=Scope.SEQUENCE,
    token_level=True,
    use_when="one sample per prompt, and a greedy answer per prompt is cheaper than a group",
)
def remax(token_rewards: torch.Tensor, response_mask: torch.Tensor, reward_baselines: torch.Tensor) -> Advantages:
    """Return the reward-to-go minus the score of the prompt's greedy response, ``reward_baselines`` (B,)
    (arXiv 2310.10505).

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    >>> mask = torch.ones(3, 2, dtype=torch.bool)
    >>> advantages, returns = remax(rewards, mask, reward_baselines=torch.tensor([0.5, 0.5, 1.0]))
    >>> advantages[:, -1]
    tensor([ 0.5000, -0.5000,  0.0000])
    """
    counted = response_mask & countable(token_rewards, response_mask).unsqueeze(-1)
    returns = reward_to_go(select(token_rewards, counted), counted, 1.0)
    return in_dtype_of(token_rewards, select(returns - reward_baselines.double().unsqueeze(-1), counted), returns)


@ADVANTAGES.register(
    "opo",
    scope=Scope.GROUP,
    group_baseline=True,
    use_when="answers of a group differ much in length, and training is strictly on-policy",
)
def opo(
    token_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    group_ids: torch.Tensor,
    reward_valid: torch.Tensor | None = None,
) -> Advantages:
    """Return the score minus the group's mean weighted by length, the baseline of least variance where gradients of
    tokens are independent (arXiv 2505.23585).

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    >>> mask = torch.ones(3, 2, dtype=torch.bool)
    >>> advantages, returns = opo(rewards, mask, group_ids=torch.tensor([7, 7, 7]))
    >>> advantages[:, -1]
    tensor([ 0.3333, -0.6667,  0.3333])
    """
    scores = scores_of(token_rewards, response_mask)
    groups = Groups.of(group_ids, countable(token_rewards, response_mask, reward_valid))
    lengths = response_mask.sum(dim=-1).double()
    baseline = groups.total(scores * lengths) / groups.total(lengths).clamp(min=1)
    advantages = torch.where(groups.comparable, scores - baseline[groups.slot], 0.0)
    return per_token(advantages, response_mask, token_rewards)


@ADVANTAGES.register(
    "gpg",
    scope=Scope.PARTITION,
    group_baseline=True,
    use_when="most groups are all right or all wrong, with the loss `gpg`: no ratio, no reference",
)
def gpg(
    token_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    group_ids: torch.Tensor,
    reward_valid: torch.Tensor | None = None,
    *,
    f_norm: PositiveFloat = 1.0,
) -> Advantages:
    """Return the deviation from the group's mean, times samples / samples with a score that is not 0, divided by
    ``f_norm``.

    Both counts are over the partition, without samples that failed. GPG (arXiv 2504.02546) divides by the samples whose
    group gives a gradient; here a sample's own score decides. With rewards of 0 and 1 the divisor counts the right
    answers: those of an all-right group, which give no gradient, too, and wrong ones never.

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    >>> mask = torch.ones(3, 2, dtype=torch.bool)
    >>> advantages, returns = gpg(rewards, mask, group_ids=torch.tensor([7, 7, 7]))
    >>> advantages[:, -1]
    tensor([ 0.5000, -1.0000,  0.5000])
    """
    if f_norm <= 0:
        raise ContractError(f"gpg f_norm = {f_norm}: write a positive divisor, such as 1.0")
    scores = scores_of(token_rewards, response_mask)
    groups = Groups.of(group_ids, countable(token_rewards, response_mask, reward_valid))
    informative = (groups.counted & (scores != 0)).sum().clamp(min=1)
    factor = groups.counted.sum().double() / informative / f_norm
    return per_token(groups.deviation(scores) * factor, response_mask, token_rewards)


@ADVANTAGES.register(
    "optimal_token_baseline",
    scope=Scope.GROUP,
    group_baseline=True,
    token_level=True,
    use_when="long answers with noisy gradients: the baseline of least variance at each position",
)
def optimal_token_baseline(
    token_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    group_ids: torch.Tensor,
    old_logprobs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    tis_weights: torch.Tensor | None = None,
    reward_valid: torch.Tensor | None = None,
) -> Advantages:
    """Return the reward-to-go minus a baseline per token position, the mean over the group weighted by gradient energy.

    ``B_t = sum_i G_it W_it / sum_i W_it``, where ``W_t`` accumulates ``1 - 2 pi + sum_v pi_v^2``, the squared norm of a
    token's score function by its logits, times the squared importance weight; the plain mean where no sample has
    energy. ``sum_pi_squared`` (B, T) is that sum over the vocabulary. A position that fewer than two samples of the
    group reach has the baseline 0, except that a group which no shared position tells apart gets 0 throughout. Li et
    al. (arXiv 2602.07078).

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    >>> mask = torch.ones(3, 2, dtype=torch.bool)
    >>> half = torch.full((3, 2), 0.5)
    >>> advantages, returns = optimal_token_baseline(rewards, mask, torch.tensor([7, 7, 7]), half.log(), half)
    >>> advantages[:, -1]
    tensor([ 0.3333, -0.6667,  0.3333])
    """
    counted = countable(token_rewards, response_mask, reward_valid)
    groups = Groups.of(group_ids, counted)
    trained = response_mask & counted.unsqueeze(-1)
    returns = reward_to_go(select(token_rewards, trained), trained, 1.0)
    energy = 1 - 2 * select(old_logprobs, trained).double().exp() + select(sum_pi_squared, trained)
    if tis_weights is not None:
        energy = energy * select(tis_weights, trained).double().square()
    # A sum of squares: what is below 0 is rounding of float32 columns, and would be a baseline beside all returns.
    weight = select(select(energy, trained).clamp(min=0).cumsum(dim=-1), trained)
    reached = groups.total(trained.double())
    # Above the lowest return of the position, so that equal returns are exactly their own mean, whatever their weights.
    lead = select(returns - groups.lowest(returns, trained)[groups.slot], trained)
    energetic = groups.total(weight)
    weighted = groups.total(lead * weight) / energetic
    above = torch.where(energetic > 0, weighted, groups.total(lead) / reached.clamp(min=1))
    apart = (groups.total(lead) > 0).any(dim=-1)
    advantages = torch.where((reached >= 2)[groups.slot], lead - above[groups.slot], returns)
    compared = trained & (groups.comparable & apart[groups.slot]).unsqueeze(-1)
    return in_dtype_of(token_rewards, select(advantages, compared), returns)


@ADVANTAGES.register(
    "tir_optimal_token_baseline",
    scope=Scope.GROUP,
    group_baseline=True,
    token_level=True,
    use_when="as `optimal_token_baseline`, with tool results between the trained tokens",
)
def tir_optimal_token_baseline(
    token_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    group_ids: torch.Tensor,
    old_logprobs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    tis_weights: torch.Tensor | None = None,
    reward_valid: torch.Tensor | None = None,
) -> Advantages:
    """Return ``optimal_token_baseline`` for multi-turn responses.

    Positions are counted in trained tokens, so that tool results of different lengths do not shift what is compared
    (arXiv 2602.07078).

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    >>> mask = torch.tensor([[True, True], [True, True], [False, True]])
    >>> half = torch.full((3, 2), 0.5)
    >>> advantages, returns = tir_optimal_token_baseline(rewards, mask, torch.tensor([7, 7, 7]), half.log(), half)
    >>> advantages[:, -1]
    tensor([ 0.5000, -0.5000,  0.3333])
    """
    order = (~response_mask).long().argsort(dim=-1, stable=True)  # trained tokens first, in order
    columns = (token_rewards, response_mask, old_logprobs, sum_pi_squared)
    rewards, mask, logprobs, squares = (column.gather(-1, order) for column in columns)
    weights = None if tis_weights is None else tis_weights.gather(-1, order)
    compact = optimal_token_baseline(rewards, mask, group_ids, logprobs, squares, weights, reward_valid)
    back = order.argsort(dim=-1)
    return compact[0].gather(-1, back), compact[1].gather(-1, back)
