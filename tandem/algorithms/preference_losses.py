"""Losses on preferences: which of two answers is the better one, or whether an answer is a good one.

A loss is ``(columns..., *, parameters) -> PreferenceLoss``. Columns: ``logprobs``, ``ref_logprobs`` (B, T) float,
``response_mask`` (B, T) bool, ``preferred`` (B,) bool, ``group_ids`` (B,) int64. A loss that names ``group_ids``
compares the two answers of a prompt and needs both; one that doesn't judges each answer alone. It gives one term per
pair, or per answer, not yet summed: so a batch may be cut between groups without changing the result. Masked entries
are replaced before any arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from tandem.algorithms.masked import masked_mean, masked_sum
from tandem.algorithms.metric import Metric
from tandem.base.errors import ContractError
from tandem.base.lazy import LazyModule
from tandem.base.registry import Registry, Scope

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

SURE = -1e-6
"""The largest mean log-prob of an answer whose odds are taken: those of a certain one are infinite."""


Smoothing = Annotated[float, Field(ge=0, lt=0.5, description="it is the probability that a label is wrong")]


@dataclass(frozen=True)
class PreferenceLoss:
    """``terms`` (P,) or (B,): one to minimise per pair or per answer; ``metrics``: sums with counts."""

    terms: torch.Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)


PREFERENCE_LOSSES: Registry[Callable[..., PreferenceLoss]] = Registry("preference loss")


@dataclass(frozen=True)
class Pairs:
    """P pairs of a batch of B answers: rows of the ``chosen`` and of the ``rejected`` ones, (P,) int64, by group id."""

    chosen: torch.Tensor
    rejected: torch.Tensor

    @classmethod
    def of(cls, preferred: torch.Tensor, group_ids: torch.Tensor) -> Pairs:
        """Return the pairs of a batch.

        Raises ``ContractError`` unless each group has exactly one preferred and one other answer.
        """
        order = torch.argsort(group_ids, stable=True)
        best = preferred[order]
        pairs = cls(order[best], order[~best])
        ids = group_ids[pairs.chosen]
        if not torch.equal(ids, group_ids[pairs.rejected]) or len(ids.unique()) < len(ids):
            raise ContractError("a group is no pair: give each group id one preferred and one other answer")
        return pairs

    def split(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``values`` (B,) of the chosen and of the rejected answers, (P,) each."""
        return values[self.chosen], values[self.rejected]


def log_sigmoid(values: torch.Tensor) -> torch.Tensor:
    """Return ``log(1 / (1 + exp(-x)))``, finite for every finite x."""
    return torch.nn.functional.logsigmoid(values)


def _log_ratio(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return ``log(pi(y|x) / ref(y|x))`` of whole answers, (B,)."""
    return masked_sum(logprobs, mask, dim=-1) - masked_sum(ref_logprobs, mask, dim=-1)


def _mean(values: torch.Tensor) -> Metric:
    return Metric.over(values, torch.ones_like(values, dtype=torch.bool))


def _above(values: torch.Tensor) -> torch.Tensor:
    """Return 1 where positive, 0 where negative, a half at 0: a model that is its own reference tells nothing apart."""
    return (values.sign() + 1) / 2


def _compared(pairs: Pairs, rewards: torch.Tensor, logprobs: torch.Tensor, mask: torch.Tensor) -> dict[str, Metric]:
    """Return the metrics of a comparison: ``rewards`` (B,) are what the loss raises for the chosen answer."""
    chosen, rejected = pairs.split(rewards)
    likely, unlikely = pairs.split(masked_sum(logprobs, mask, dim=-1))
    return {
        "preference/accuracy": _mean(_above(chosen - rejected)),
        "preference/margin": _mean(chosen - rejected),
        "preference/chosen_reward": _mean(chosen),
        "preference/rejected_reward": _mean(rejected),
        "preference/chosen_logprob": _mean(likely),
        "preference/rejected_logprob": _mean(unlikely),
    }


@PREFERENCE_LOSSES.register(
    "dpo",
    scope=Scope.GROUP,
    use_when="pairs of a better and a worse answer: the first thing to try; label_smoothing where labels are noisy",
)
def dpo(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    response_mask: torch.Tensor,
    preferred: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    beta: PositiveFloat = 0.1,
    label_smoothing: Smoothing = 0.0,
) -> PreferenceLoss:
    """Return ``-log sigmoid(beta h)``, h the chosen answer's log-ratio to the reference minus the rejected one's.

    DPO (arXiv 2305.18290, equation 7). ``label_smoothing`` e, the probability that a label is wrong, gives conservative
    DPO, ``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`` (discussed in arXiv 2403.00409). Rewards of the
    metrics are ``beta`` times the log-ratio.

    >>> logprobs, ref = torch.tensor([[-1.0, -1.0], [-3.0, -3.0]]), torch.tensor([[-2.0, -2.0], [-2.0, -2.0]])
    >>> mask, better, ids = torch.ones(2, 2, dtype=torch.bool), torch.tensor([True, False]), torch.tensor([5, 5])
    >>> dpo(logprobs, ref, mask, better, ids, beta=0.1).terms
    tensor([0.5130])
    """
    if beta <= 0 or not 0 <= label_smoothing < 0.5:
        raise ContractError(
            f"beta = {beta}, label_smoothing = {label_smoothing}: write beta > 0, smoothing in [0, 0.5)"
        )
    pairs, rewards = Pairs.of(preferred, group_ids), beta * _log_ratio(logprobs, ref_logprobs, response_mask)
    chosen, rejected = pairs.split(rewards)
    margin = chosen - rejected
    terms = -(1 - label_smoothing) * log_sigmoid(margin) - label_smoothing * log_sigmoid(-margin)
    return PreferenceLoss(terms, _compared(pairs, rewards, logprobs, response_mask))


@PREFERENCE_LOSSES.register(
    "ipo",
    scope=Scope.GROUP,
    use_when="pairs that DPO overfits: each is pushed to a fixed margin and no further",
)
def ipo(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    response_mask: torch.Tensor,
    preferred: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    beta: PositiveFloat = 0.1,
) -> PreferenceLoss:
    """Return ``(h - 1 / (2 beta))^2``, h as in ``dpo`` (IPO, arXiv 2310.12036, equation 17; ``beta`` is its tau).

    Rewards of the metrics are ``beta`` times the log-ratio, so that the margin that it aims at is 1/2.

    >>> logprobs, ref = torch.tensor([[-1.0, -1.0], [-3.0, -3.0]]), torch.tensor([[-2.0, -2.0], [-2.0, -2.0]])
    >>> mask, better, ids = torch.ones(2, 2, dtype=torch.bool), torch.tensor([True, False]), torch.tensor([5, 5])
    >>> ipo(logprobs, ref, mask, better, ids, beta=0.1).terms
    tensor([1.])
    """
    if beta <= 0:
        raise ContractError(f"beta = {beta}: the wanted margin is 1 / (2 beta), so write a number above 0")
    pairs, ratio = Pairs.of(preferred, group_ids), _log_ratio(logprobs, ref_logprobs, response_mask)
    chosen, rejected = pairs.split(ratio)
    terms = (chosen - rejected - 1 / (2 * beta)).square()
    return PreferenceLoss(terms, _compared(pairs, beta * ratio, logprobs, response_mask))


@PREFERENCE_LOSSES.register(
    "orpo",
    scope=Scope.GROUP,
    use_when="pairs and a model that was not fine-tuned yet: fine-tunes and compares at once, without a reference",
)
def orpo(
    logprobs: torch.Tensor,
    response_mask: torch.Tensor,
    preferred: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    beta: NonNegativeFloat = 0.1,
) -> PreferenceLoss:
    """Return the mean NLL of the chosen answer's tokens minus ``beta log sigmoid(log odds ratio)``: no reference.

    ORPO (arXiv 2403.07691, equations 3 to 7; ``beta`` is its lambda): the odds p / (1 - p) are those of the geometric
    mean of an answer's token probabilities. Rewards of the metrics are ``beta`` times the mean log-prob.

    >>> logprobs = torch.tensor([[-1.0, -1.0], [-3.0, -3.0]])
    >>> mask, better, ids = torch.ones(2, 2, dtype=torch.bool), torch.tensor([True, False]), torch.tensor([5, 5])
    >>> orpo(logprobs, mask, better, ids, beta=0.1).terms
    tensor([1.0086])
    """
    if beta < 0:
        raise ContractError(f"beta = {beta}: the weight of the odds ratio can't be negative")
    pairs, mean = Pairs.of(preferred, group_ids), masked_mean(logprobs, response_mask, dim=-1)
    bounded = mean.clamp(max=SURE)
    log_odds = bounded - torch.log(-torch.expm1(bounded))
    chosen, rejected = pairs.split(log_odds)
    nll = -pairs.split(mean)[0]
    terms = nll - beta * log_sigmoid(chosen - rejected)
    metrics = _compared(pairs, beta * mean, logprobs, response_mask)
    metrics["preference/nll"] = _mean(nll)
    metrics["preference/log_odds_ratio"] = _mean(chosen - rejected)
    return PreferenceLoss(terms, metrics)


@PREFERENCE_LOSSES.register(
    "simpo",
    scope=Scope.GROUP,
    use_when="pairs, no memory for a reference, and answers that must not grow longer",
)
def simpo(
    logprobs: torch.Tensor,
    response_mask: torch.Tensor,
    preferred: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    beta: PositiveFloat = 2.0,
    gamma: float = 1.0,
) -> PreferenceLoss:
    """Return ``-log sigmoid(r - r' - gamma)``, r = ``beta`` times the mean log-prob of an answer's tokens: no
    reference.

    SimPO (arXiv 2405.14734, equation 6); r' is the rejected answer's, ``gamma`` the margin asked for. Rewards of the
    metrics are r.

    >>> logprobs = torch.tensor([[-1.0, -1.0], [-3.0, -3.0]])
    >>> mask, better, ids = torch.ones(2, 2, dtype=torch.bool), torch.tensor([True, False]), torch.tensor([5, 5])
    >>> simpo(logprobs, mask, better, ids, beta=2.0, gamma=1.0).terms
    tensor([0.0486])
    """
    if beta <= 0:
        raise ContractError(f"beta = {beta}: it scales the reward, so write a number above 0")
    pairs, rewards = Pairs.of(preferred, group_ids), beta * masked_mean(logprobs, response_mask, dim=-1)
    chosen, rejected = pairs.split(rewards)
    terms = -log_sigmoid(chosen - rejected - gamma)
    return PreferenceLoss(terms, _compared(pairs, rewards, logprobs, response_mask))


@PREFERENCE_LOSSES.register(
    "kto",
    scope=Scope.PARTITION,
    use_when="answers that were only marked good or bad, not compared; pairs are taken as one of each",
)
def kto(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    response_mask: torch.Tensor,
    preferred: torch.Tensor,
    reference_point: torch.Tensor,
    *,
    beta: PositiveFloat = 0.1,
    desirable_weight: NonNegativeFloat = 1.0,
    undesirable_weight: NonNegativeFloat = 1.0,
) -> PreferenceLoss:
    """Return ``w (1 - sigmoid(+-beta (log-ratio - z)))``: plus for a good answer, minus for a bad one, each with its
    weight w.

    KTO (arXiv 2402.01306, equation 8). z is ``reference_point`` (B,): ``max(0, KL(policy || reference))`` estimated on
    mismatched pairs of the partition, without gradient; see ``reference_point_of``. Rewards of the metrics are
    ``beta`` times the log-ratio; accuracy is the fraction of good answers above z and of bad ones below it.

    >>> logprobs, ref = torch.tensor([[-1.0, -1.0], [-3.0, -3.0]]), torch.tensor([[-2.0, -2.0], [-2.0, -2.0]])
    >>> mask, better = torch.ones(2, 2, dtype=torch.bool), torch.tensor([True, False])
    >>> kto(logprobs, ref, mask, better, torch.zeros(2), beta=0.1).terms
    tensor([0.4502, 0.4502])
    """
    if beta <= 0 or desirable_weight < 0 or undesirable_weight < 0:
        raise ContractError(
            f"beta = {beta}, desirable_weight = {desirable_weight}, undesirable_weight = {undesirable_weight}: write "
            "beta > 0 and weights of at least 0"
        )
    ratio = _log_ratio(logprobs, ref_logprobs, response_mask)
    gain = beta * torch.where(preferred, ratio - reference_point, reference_point - ratio)
    weights = torch.where(preferred, desirable_weight, undesirable_weight).to(ratio.dtype)
    rewards, likely = beta * ratio, masked_sum(logprobs, response_mask, dim=-1)
    metrics = {
        "preference/accuracy": _mean(_above(gain)),
        "preference/chosen_reward": Metric.over(rewards, preferred),
        "preference/rejected_reward": Metric.over(rewards, ~preferred),
        "preference/chosen_logprob": Metric.over(likely, preferred),
        "preference/rejected_logprob": Metric.over(likely, ~preferred),
        "preference/reference_point": _mean(reference_point),
    }
    return PreferenceLoss(weights * torch.sigmoid(-gain), metrics)


def reference_point_of(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return KTO's z, a scalar: ``max(0, mean log(pi(y'|x) / ref(y'|x)))`` (arXiv 2402.01306, section 4).

    All inputs (M, T): each row is a prompt with an answer y' that was given to another prompt.

    >>> other_answers, by_reference = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.5]])
    >>> reference_point_of(other_answers, by_reference, torch.tensor([[True, True]])).item()
    1.0
    """
    return _log_ratio(logprobs, ref_logprobs, response_mask).mean().clamp(min=0)
