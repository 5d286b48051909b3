"""On-policy distillation: the student samples, a teacher says of each token how likely it finds it.

An objective is ``(columns..., *, parameters) -> DistillationTerms``. Either it gives an advantage to each sampled
token, which a policy loss then uses as it uses that of the reward, or a term of the loss with a gradient of its own.
``teacher_topk_logprobs`` and ``student_topk_logprobs`` are (B, T, k): what teacher and student give the teacher's k
likeliest tokens in each place. All other columns are (B, T). All log-probs are at the rollout's temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import PositiveInt

from tandem.algorithms.advantage import reward_to_go
from tandem.algorithms.masked import select
from tandem.algorithms.metric import Metric
from tandem.algorithms.policy_loss import log_ratio
from tandem.base.errors import ContractError
from tandem.base.lazy import LazyModule
from tandem.base.ranges import Fraction, InnerFraction
from tandem.base.registry import Registry, Scope, Signature

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

CANDIDATES, AT_CANDIDATES = "teacher_topk_ids", "student_topk_logprobs"
"""Who asks for the first column, token ids (b, L, k), also gets the current log-probs of these tokens: the second."""

SMALLEST_TAIL = 1e-6
"""Probability that the tokens outside the top k have at least: what is less is rounding in float32."""


@dataclass(frozen=True)
class DistillationTerms:
    """``advantages`` (B, T), without gradient, or ``per_token`` (B, T) terms of the loss; 0 outside the mask.

    ``metrics``: sums with counts.
    """

    advantages: torch.Tensor | None = None
    per_token: torch.Tensor | None = None
    metrics: dict[str, Metric] = field(default_factory=dict)


def teacher_columns(signature: Signature) -> tuple[str, ...]:
    """Return what an objective needs of the teacher's forward."""
    given = tuple(name for name in signature.columns if name.startswith("teacher_"))
    return (*given, CANDIDATES) if AT_CANDIDATES in signature.columns else given


DISTILLATIONS: Registry[Callable[..., DistillationTerms]] = Registry("distillation")


@DISTILLATIONS.register(
    "reverse_kl",
    scope=Scope.SEQUENCE,
    use_when="the default: one log-prob a token of the teacher; beside a reward, the two advantages add up",
)
def reverse_kl(
    old_logprobs: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    discount: Fraction = 0.0,
) -> DistillationTerms:
    """Return the advantage ``log teacher - log student`` of each sampled token: on-policy descent of KL(student ||
    teacher).

    With a ``discount`` above 0 a token also answers for the discounted ones after it; at 1 that is the gradient of the
    whole sequence's KL. MiniLLM (Gu et al., arXiv 2306.08543, equation 1 and section 2.2); per token as in Lu et al.,
    "On-policy distillation", Thinking Machines Lab (2025). The student's log-probs are those of the start of the step,
    and log-ratios are clamped to +-20. Metric ``distill/kl``: the mean of ``log student - log teacher`` over the
    trained tokens, which estimates KL(student || teacher).

    >>> old, teacher, mask = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-0.5, -2.0]]), torch.tensor([[True, True]])
    >>> reverse_kl(old, teacher, mask, discount=0.0).advantages
    tensor([[ 0.5000, -1.0000]])
    """
    if not 0 <= discount <= 1:
        raise ContractError(f"discount = {discount}: write a number from 0 (each token for itself) to 1")
    gap = -log_ratio(old_logprobs.detach(), teacher_logprobs, response_mask)
    advantages = reward_to_go(gap, response_mask, discount).to(gap.dtype) if discount else gap
    return DistillationTerms(advantages=advantages, metrics={"distill/kl": Metric.over(-gap, response_mask)})


@DISTILLATIONS.register(
    "forward_kl_topk",
    scope=Scope.TOKEN,
    use_when="few samples, a weak student: a whole distribution a token, also of what it would not sample itself",
)
def forward_kl_topk(
    student_topk_logprobs: torch.Tensor,
    teacher_topk_logprobs: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    top_k: PositiveInt = 64,
) -> DistillationTerms:
    """Return KL(teacher || student) of the next token, over the teacher's ``top_k`` likeliest tokens and the rest as
    one.

    ``sum_j p_j log(p_j / q_j)`` with p the teacher's and q the student's probabilities of these k + 1 events: a lower
    bound of the KL over the vocabulary, and equal to it where k is the whole of it. Keeping the rest as an event,
    unlike renormalising the k tokens, punishes a student whose mass lies outside. Distillation of Hinton et al. (arXiv
    1503.02531), on the student's own samples as in GKD (Agarwal et al., arXiv 2306.13649). Metrics: ``distill/kl``,
    and ``distill/tail``, the teacher's mean mass outside its top k.

    >>> teacher, student = torch.tensor([[[0.6, 0.3]]]).log(), torch.tensor([[[0.3, 0.6]]]).log()
    >>> forward_kl_topk(student, teacher, torch.tensor([[True]]), top_k=2).per_token
    tensor([[0.2079]])
    """
    teacher, student = (
        _events(teacher_topk_logprobs, response_mask, top_k),
        _events(student_topk_logprobs, response_mask, top_k),
    )
    return _loss(_kl(teacher, student), teacher, response_mask)


@DISTILLATIONS.register(
    "jsd_topk", scope=Scope.TOKEN, use_when="between the two: less spread than the forward KL, bounded"
)
def jsd_topk(
    student_topk_logprobs: torch.Tensor,
    teacher_topk_logprobs: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    top_k: PositiveInt = 64,
    beta: InnerFraction = 0.5,
) -> DistillationTerms:
    """Return the generalised Jensen-Shannon divergence of the next token, over the same k + 1 events as
    ``forward_kl_topk``.

    ``beta KL(p || m) + (1 - beta) KL(q || m)`` with ``m = beta p + (1 - beta) q``, 0 < ``beta`` < 1: GKD (Agarwal et
    al., arXiv 2306.13649). A small ``beta`` leans to the forward KL, one near 1 to the reverse. Metrics as
    there.

    >>> teacher, student = torch.tensor([[[0.6, 0.3]]]).log(), torch.tensor([[[0.3, 0.6]]]).log()
    >>> jsd_topk(student, teacher, torch.tensor([[True]]), top_k=2, beta=0.5).per_token
    tensor([[0.0510]])
    """
    if not 0 < beta < 1:
        raise ContractError(f"beta = {beta}: write a number between 0 and 1, or use forward_kl_topk")
    teacher, student = (
        _events(teacher_topk_logprobs, response_mask, top_k),
        _events(student_topk_logprobs, response_mask, top_k),
    )
    mixed = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return _loss(beta * _kl(teacher, mixed) + (1 - beta) * _kl(student, mixed), teacher, response_mask)


def _events(logprobs: torch.Tensor, response_mask: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the log-probs (B, T, k) -> (B, T, k + 1): those of the k tokens, and of all others together.

    Masked places become constants, whatever stands there.
    """
    if logprobs.shape[-1] != top_k:
        raise ContractError(f"top_k = {top_k}, and the columns hold {logprobs.shape[-1]} tokens at each place")
    chosen = torch.where(response_mask.unsqueeze(-1), logprobs, -math.log(top_k + 1))
    inside = chosen.exp().sum(-1, keepdim=True)
    return torch.cat([chosen, torch.log1p(-inside.clamp(max=1 - SMALLEST_TAIL))], dim=-1)


def _kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return KL(first || second) of log-probs (B, T, k + 1): (B, T)."""
    return (first.exp() * (first - second)).sum(-1)


def _loss(divergence: torch.Tensor, teacher: torch.Tensor, response_mask: torch.Tensor) -> DistillationTerms:
    per_token = select(divergence, response_mask)
    metrics = {
        "distill/kl": Metric.over(per_token, response_mask),
        "distill/tail": Metric.over(teacher[..., -1].exp(), response_mask),
    }
    return DistillationTerms(per_token=per_token, metrics=metrics)
