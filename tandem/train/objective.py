"""What is minimised: from the log-probs of a micro-batch to the sum that it contributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tandem.algorithms.distillation import DISTILLATIONS, DistillationTerms, teacher_columns
from tandem.algorithms.kl import kl_per_token
from tandem.algorithms.masked import masked_sum
from tandem.algorithms.metric import Metric
from tandem.algorithms.policy_loss import POLICY_LOSSES, PolicyLoss, log_ratio
from tandem.algorithms.reduce import Aggregation, LossCounts, denominator, loss_numerator
from tandem.base.registry import Entry, Scope
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.train.routing import BALANCE, Routing

COMPUTED = ("logprobs", "entropies", "response_mask")
"""Columns that every objective gets without asking."""


@dataclass(frozen=True)
class LossSum:
    """What a micro-batch contributes: an undivided ``loss`` (scalar, with gradient) and ``metrics`` that add up;
    ``routing`` of a mixture of experts.
    """

    loss: torch.Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)
    routing: Routing | None = None

    def __add__(self, other: LossSum) -> LossSum:
        found = [x.routing for x in (self, other) if x.routing is not None]
        routing = found[0] + found[1] if len(found) == 2 else next(iter(found), None)
        names = self.metrics.keys() | other.metrics.keys()
        parts = {name: [x.metrics[name] for x in (self, other) if name in x.metrics] for name in sorted(names)}
        metrics = {n: p[0] if len(p) == 1 else p[0] + p[1] for n, p in parts.items()}
        return LossSum(self.loss + other.loss, metrics, routing)


class Objective(Protocol):
    """A loss as a sum over samples, divided once per optimizer step: ``PolicyObjective``, ``PreferenceObjective``,
    ``ValueObjective``, and the simplest, ``SftObjective``.
    """

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the batch that ``numerator`` must get, beside ``COMPUTED``."""

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """Columns that it uses where the batch has them."""

    @property
    def wants_entropy(self) -> bool:
        """Whether entropies are computed, beside the log-probs and from the same logits."""

    @property
    def needs_entropy(self) -> bool:
        """Whether they are computed with their gradient."""

    @property
    def router_coef(self) -> float:
        """What the balance of the routers weighs, which ``numerator`` then gets as the column ``BALANCE``."""

    @property
    def whole_groups(self) -> bool:
        """Whether the samples of a group must come together: in one micro-batch, on one rank."""

    def numerator(
        self, columns: Mapping[str, torch.Tensor], logprobs: torch.Tensor, entropies: torch.Tensor | None
    ) -> LossSum:
        """Return the loss's sum over ``columns`` and ``logprobs`` (b, L), right-padded; ``logprobs`` is 0 outside
        ``response_mask``.
        """

    def denominator(self, batch: DataProto) -> float:
        """Return what the sum over the whole mini-batch ``batch`` (all ranks) is divided by."""


@dataclass(frozen=True)
class Distillation:
    """Learning from a teacher. ``type`` names a registered objective, ``parameters`` are its YAML parameters.

    ``only``: there are no advantages of a reward beside it.
    """

    type: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    coef: float = 1.0
    only: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the teacher that the objective reads."""
        return teacher_columns(DISTILLATIONS[self.type].signature)

    def terms(self, given: Mapping[str, Any]) -> DistillationTerms:
        """Return the objective's advantages or loss terms, not yet weighted."""
        entry = DISTILLATIONS[self.type]
        return entry.target(**{name: given[name] for name in entry.signature.columns}, **self.parameters)


@dataclass(frozen=True)
class PolicyObjective:
    """Policy loss, plus ``kl_coef`` x KL to the reference, minus ``entropy_coef`` x entropy, per token.

    ``policy_loss`` names a registered loss, ``parameters`` are its YAML parameters. Without a column ``old_logprobs``
    the policy is on its first update: old is the current one, detached. ``norm`` is the constant of
    ``seq-mean-token-sum-norm``. ``distillation`` adds to the advantages or to the loss. ``old_from_rollout``: the old
    log-probs are the engine's own, so that it is compared with what this forward finds. ``version``: that of the
    weights before the step, where it is known: tokens of theirs are told apart from older ones in that comparison.
    ``router_coef`` x the balance of the sample (``BALANCE``) is added to each of its tokens.
    """

    policy_loss: str = "ppo_clip"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    aggregation: Aggregation | str = Aggregation.TOKEN_MEAN
    norm: float | None = None
    kl_type: str = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    distillation: Distillation | None = None
    old_from_rollout: bool = False
    version: int | None = None
    router_coef: float = 0.0

    @property
    def entry(self) -> Entry[Callable[..., PolicyLoss]]:
        """The registered policy loss with its declared facts."""
        return POLICY_LOSSES[self.policy_loss]

    @property
    def reads_old(self) -> bool:
        """Whether it compares with the policy at the start of the step."""
        read = self.entry.signature.columns
        if self.distillation is not None:
            read += DISTILLATIONS[self.distillation.type].signature.columns
        return "old_logprobs" in read

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the loss, of a KL to the reference if there is one, and of a distillation."""
        teaching = self.distillation
        absent = (*COMPUTED, "old_logprobs", *(("advantages",) if teaching is not None and teaching.only else ()))
        own = tuple(c for c in self.entry.signature.columns if c not in absent)
        kl = ("ref_logprobs",) if self.kl_coef and "ref_logprobs" not in own else ()
        return (*own, *kl, *(() if teaching is None else teaching.columns))

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """Importance weights and the like; what may be implied; the engine's log-probs to compare with."""
        versions = () if self.version is None else ("token_versions",)
        return (*self.entry.signature.optional_columns, "old_logprobs", "rollout_logprobs", "loss_mask", *versions)

    @property
    def wants_entropy(self) -> bool:
        """True: whether a policy explores is what one looks at first."""
        return True

    @property
    def needs_entropy(self) -> bool:
        """True with an entropy bonus."""
        return self.entropy_coef != 0.0

    @property
    def whole_groups(self) -> bool:
        """True for a loss that compares samples with each other."""
        return self.entry.scope >= Scope.GROUP

    def numerator(
        self, columns: Mapping[str, torch.Tensor], logprobs: torch.Tensor, entropies: torch.Tensor | None
    ) -> LossSum:
        """Return the policy loss with KL, entropy and distillation terms, summed over the rows and not yet divided."""
        whole, mask = columns["response_mask"], loss_mask(columns)
        old = columns.get("old_logprobs", logprobs.detach())
        computed = {"old_logprobs": old, "logprobs": logprobs, "entropies": entropies}
        given = {**columns, **computed, "response_mask": mask}
        policy = self._taught(given) if self.distillation is not None else self._policy(given)
        per_token, metrics = policy.per_token, dict(policy.metrics)
        if "rollout_logprobs" in columns:
            trainer = logprobs if self.old_from_rollout else old
            metrics |= mismatch(trainer, columns["rollout_logprobs"], whole, self._fresh(columns))
        if self.kl_coef:
            kl = kl_per_token(self.kl_type, logprobs, columns["ref_logprobs"], mask)
            per_token = per_token + self.kl_coef * kl
            metrics["kl"] = Metric.over(kl, mask)
        if entropies is not None:
            metrics["entropy"] = Metric.over(entropies, mask)
            if self.entropy_coef:
                per_token = per_token - self.entropy_coef * entropies
        if self.router_coef:
            per_token = per_token + self.router_coef * columns[BALANCE][:, None]
        return LossSum(loss_numerator(per_token, mask, self.aggregation), metrics)

    def denominator(self, batch: DataProto) -> float:
        """Return what the summed loss of the whole mini-batch is divided by, as the aggregation says."""
        return denominator(self.aggregation, trained_counts(batch), norm=self.norm)

    def _fresh(self, columns: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return which tokens are of the weights that are trained here, (b, L); None where that isn't known."""
        if self.version is None or "token_versions" not in columns:
            return None
        return columns["token_versions"].eq(self.version)

    def _policy(self, given: Mapping[str, Any]) -> PolicyLoss:
        signature = self.entry.signature
        names = (*signature.columns, *(name for name in signature.optional_columns if name in given))
        return self.entry.target(**{name: given[name] for name in names}, **self.parameters)

    def _taught(self, given: Mapping[str, Any]) -> PolicyLoss:
        """Return the policy loss on the advantages of reward and teacher, plus the teacher's own terms."""
        assert self.distillation is not None
        teaching, coef = self.distillation.terms(given), self.distillation.coef
        advantages = torch.zeros_like(given["logprobs"]) if self.distillation.only else given["advantages"]
        if teaching.advantages is not None:
            advantages = advantages + coef * teaching.advantages
        if self.distillation.only and teaching.advantages is None:
            policy = PolicyLoss(torch.zeros_like(given["logprobs"]))
        else:
            policy = self._policy({**given, "advantages": advantages})
        per_token = policy.per_token if teaching.per_token is None else policy.per_token + coef * teaching.per_token
        return PolicyLoss(per_token, {**policy.metrics, **teaching.metrics})


def mismatch(
    trainer_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    response_mask: torch.Tensor,
    fresh: torch.Tensor | None = None,
) -> dict[str, Metric]:
    """Return how far the engine that sampled is from the trainer, over the trained tokens; inputs (B, T).

    ``mismatch/kl`` and ``mismatch/k3`` estimate KL(rollout || trainer), ``mismatch/abs`` is the mean absolute
    difference of log-probs: 0 up to rounding where engine and trainer hold the same weights. With ``fresh``, the tokens
    that were sampled with the trainer's weights, the last two also of these alone (``_same``: the engine's error) and
    of the others (``_older``: with it, how far the policy has moved since).
    """
    delta = log_ratio(trainer_logprobs.detach(), rollout_logprobs, response_mask)
    k3, distance = delta.expm1() - delta, delta.abs()
    found = {
        "mismatch/kl": Metric.over(-delta, response_mask),
        "mismatch/k3": Metric.over(k3, response_mask),
        "mismatch/abs": Metric.over(distance, response_mask),
    }
    if fresh is not None:
        for name, tokens in (("same", response_mask & fresh), ("older", response_mask & ~fresh)):
            found[f"mismatch/k3_{name}"] = Metric.over(k3, tokens)
            found[f"mismatch/abs_{name}"] = Metric.over(distance, tokens)
    return found


@dataclass(frozen=True)
class SftObjective:
    """Mean negative log-likelihood of the tokens that ``response_mask`` selects."""

    columns: tuple[str, ...] = ()
    optional_columns: tuple[str, ...] = ()
    wants_entropy: bool = False
    needs_entropy: bool = False
    router_coef: float = 0.0
    whole_groups: bool = False

    def numerator(
        self, columns: Mapping[str, torch.Tensor], logprobs: torch.Tensor, entropies: torch.Tensor | None
    ) -> LossSum:
        """Return the negative log-likelihood of the learned tokens, summed."""
        del entropies
        mask = columns["response_mask"]
        return LossSum(masked_sum(-logprobs, mask), {"nll": Metric.over(-logprobs, mask)})

    def denominator(self, batch: DataProto) -> float:
        """Count the trained tokens of the mini-batch."""
        return denominator(Aggregation.TOKEN_MEAN, trained_counts(batch))


def loss_mask(columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return ``trained_mask`` of columns (b, L): which tokens enter the loss."""
    whole = columns["response_mask"]
    return whole & columns.get("loss_mask", whole)


def trained_mask(batch: DataProto) -> Ragged:
    """Return which tokens enter the loss: ``response_mask``, less what a ``loss_mask`` leaves out."""
    mask = batch.ragged("response_mask")
    if "loss_mask" not in batch.batch:
        return mask
    return mask.like(mask.values & batch.ragged("loss_mask").values)


def trained_counts(batch: DataProto) -> LossCounts:
    """Count the tokens that enter the loss, and samples that have one."""
    mask = trained_mask(batch)
    sample = torch.repeat_interleave(mask.lengths)[mask.values.cpu()]
    return LossCounts(tokens=len(sample), sequences=len(torch.unique(sample)))
