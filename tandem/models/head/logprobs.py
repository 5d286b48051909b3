"""Log-probs and entropies of chosen tokens without a ``[tokens, vocabulary]`` matrix in memory.

Logits are computed for a chunk of tokens at a time. The backward keeps nothing of them but the log-sum-exp: it computes
the chunk's logits once more and turns them into their own gradient in place. Where the vocabulary is split over ranks,
each has the logits of its own tokens, and they meet over numbers per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from tandem.models.device import memory_of
from tandem.models.head.projection import Head, Transform, without
from tandem.models.head.vocabulary import SplitVocabulary

CHUNK_ELEMENTS = 1 << 23
"""Logits held at once on a CPU (32 MiB in float32), and at least on any device. Fewer than this in all: they are kept,
and nothing is recomputed."""
MOST_ELEMENTS = 1 << 28
"""Logits held at once on the largest device (1 GiB in float32)."""
_BYTES_FOR_ONE = 16 * 32
"""A logit is there four times, in float32; all of them may take a 32nd of a device."""


@dataclass(frozen=True)
class Projection:
    """The projection of hidden states to logits over the temperature, in float32 (float64 for such weights)."""

    temperature: float
    transform: Transform
    holes: torch.Tensor | None = None

    @classmethod
    def of(cls, head: Head, temperature: float) -> Projection:
        """Return what ``head`` does beside its product."""
        return cls(temperature, head.transform, head.holes if head.split is None else head.split.holes)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Turn hidden (n, d) and weight (V, d) into logits (n, V)."""
        logits = linear(hidden, weight, bias)
        if logits.dtype != torch.float64:
            logits = logits.float()
        logits = without(self.transform(logits), self.holes)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def grad_through(self, grad: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Turn the gradient by the final ``logits`` into that by the plain product, in place, in the inverse order of
        ``logits``.
        """
        softcap = self.transform.softcap
        if softcap is not None:
            grad.mul_(1 - (logits * (self.temperature / softcap)).square())
        factor = self.transform.scale / self.temperature
        return grad if factor == 1.0 else grad.mul_(factor)


def token_logprobs(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    want_entropy: bool = False,
    entropy_grad: bool = False,
    chunk_elements: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probs of ``targets`` int64 under ``log_softmax(logits / temperature)``, and entropies if wanted.

    ``hidden`` (N, d). ``targets`` are (N,), or (N, K) for K tokens in each place; log-probs have their shape, entropies
    are (N,), float32 even for bfloat16 weights (float64 for float64). Entropies of the same distribution, in nats,
    carry a gradient only with ``entropy_grad``. ``chunk_elements`` bounds the logits that are in memory at once (None:
    by the device), and never changes a value beyond rounding.
    """
    weight, bias = _computing(hidden, head)
    hidden = hidden.to(weight.dtype)
    projection = Projection.of(head, temperature)
    want_entropy = want_entropy or entropy_grad
    wanted = targets if targets.dim() == 2 else targets[:, None]
    chunk_elements = chunk_on(hidden.device) if chunk_elements is None else chunk_elements
    if head.split is None and len(targets) * len(weight) <= chunk_elements:
        logprobs, entropies = _at_once(projection.logits(hidden, weight, bias), wanted, want_entropy, entropy_grad)
    else:
        rows = max(1, chunk_elements // len(weight))
        logprobs, entropies = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, wanted, projection, head.split, rows, want_entropy, entropy_grad
        )
    return logprobs.view(targets.shape), (entropies if want_entropy else None)


@torch.no_grad()
def top_logprobs(
    hidden: torch.Tensor,
    head: Head,
    count: int,
    *,
    below: int,
    temperature: float = 1.0,
    chunk_elements: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` likeliest tokens after each of ``hidden`` (N, d): log-probs (N, count) and ids int64,
    falling.

    Log-probs are of ``log_softmax(logits / temperature)`` over the whole vocabulary, without gradient; only tokens with
    an id below ``below`` are chosen. Memory as in ``token_logprobs``.
    """
    weight, bias = _computing(hidden, head)
    projection = Projection.of(head, temperature)
    split, values, ids = head.split, [], []
    if chunk_elements is None:  # ranks that share the vocabulary meet for each chunk, so they must cut alike
        chunk_elements = chunk_on(hidden.device) if split is None else CHUNK_ELEMENTS
    for part in hidden.to(weight.dtype).split(max(1, chunk_elements // len(weight))):
        logits = projection.logits(part, weight, bias)
        normaliser = logits.logsumexp(-1, keepdim=True)
        if split is None:
            best = logits[:, :below].topk(count, dim=-1)
            values.append(best.values - normaliser)
            ids.append(best.indices)
            continue
        logits[:, max(0, below - split.first) :] = -torch.inf
        best = logits.topk(min(count, split.rows), dim=-1)
        most, which = split.best(best.values, best.indices + split.first, count)
        values.append(most - split.share(normaliser[:, 0])[0][:, None])
        ids.append(which)
    return torch.cat(values), torch.cat(ids)


@torch.no_grad()
def sum_pi_squared(
    hidden: torch.Tensor, head: Head, *, temperature: float = 1.0, chunk_elements: int | None = None
) -> torch.Tensor:
    """Return ``sum_v pi_v^2`` of each next-token distribution ``softmax(logits / temperature)``: (N,) from ``hidden``
    (N, d).

    float32 (float64 for float64 weights), without gradient: the probability that two draws are the same token. The
    logits are computed once more, in chunks of at most ``chunk_elements``.
    """
    weight, bias = _computing(hidden, head)
    projection = Projection.of(head, temperature)
    rows = max(1, (chunk_on(hidden.device) if chunk_elements is None else chunk_elements) // len(weight))
    sums, normalisers = [], []
    for part in hidden.to(weight.dtype).split(rows):
        logits = projection.logits(part, weight, bias)
        sums.append(logits.softmax(-1).square().sum(-1))
        if head.split is not None:
            normalisers.append(logits.logsumexp(-1))
    whole = torch.cat(sums)
    if head.split is None:
        return whole
    share = head.split.share(torch.cat(normalisers))[1]
    return head.split.sum(whole * (2 * share).exp())


def chunk_on(device: torch.device) -> int:
    """Return how many logits are held at once on ``device``: each chunk reads the whole head and rewrites its gradient,
    so a large device takes few.
    """
    if device.type == "cpu":
        return CHUNK_ELEMENTS
    return min(MOST_ELEMENTS, max(CHUNK_ELEMENTS, memory_of(device) // _BYTES_FOR_ONE))


def _computing(hidden: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight and bias of the head's tokens in the dtype in which the device of ``hidden`` computes."""
    device, (weight, bias) = hidden.device.type, head.rows()
    if not torch.is_autocast_enabled(device):
        return weight, bias
    compute = torch.get_autocast_dtype(device)
    return weight.to(compute), None if bias is None else bias.to(compute)


def _at_once(
    logits: torch.Tensor, targets: torch.Tensor, want_entropy: bool, entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    every = torch.log_softmax(logits, -1)
    chosen = every.gather(1, targets)
    if not want_entropy:
        return chosen, chosen
    every = every if entropy_grad else every.detach()
    return chosen, _entropy(every)


def _entropy(every: torch.Tensor) -> torch.Tensor:
    """Return the entropy (n,) of log-probs (n, V)."""
    return -(every.exp() * every).sum(-1)


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probs (N, K) and entropies (N,); keeps (N,) log-sum-exps and entropies for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        projection: Projection,
        split: SplitVocabulary | None,
        rows: int,
        want_entropy: bool,
        entropy_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, normalisers, entropies = [], [], []
        here = None
        if split is not None:
            targets, here = split.own(targets)
        for part, chosen in zip(hidden.split(rows), targets.split(rows), strict=True):
            logits = projection.logits(part, weight, bias)
            normaliser = logits.logsumexp(-1)
            logprobs.append(logits.gather(1, chosen) - normaliser[:, None])
            normalisers.append(normaliser)
            if want_entropy:
                entropies.append(_entropy(logits.sub_(normaliser[:, None])))
        every, normaliser = torch.cat(logprobs), torch.cat(normalisers)
        entropy = torch.cat(entropies) if want_entropy else every.new_empty(0)
        if split is not None and here is not None:
            every, normaliser, entropy = split.joined(every, here, normaliser, entropy)
        ctx.save_for_backward(hidden, weight, bias, targets, here, normaliser, entropy)
        ctx.projection, ctx.split, ctx.rows, ctx.entropy_grad = projection, split, rows, entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return every, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropies: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, here, normalisers, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Summed in float32 over the chunks even where the weights are bfloat16.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        for first in range(0, len(targets), ctx.rows):
            part = slice(first, first + ctx.rows)
            logits = ctx.projection.logits(hidden[part], weight, bias)
            # d logprob / d logits = onehot - p, summed over the K targets;  d entropy / d logits = -p (log p + entropy)
            softmax = (logits - normalisers[part, None]).exp_()
            per_softmax = -grad_logprobs[part].sum(1, keepdim=True)
            if ctx.entropy_grad:
                surprise = logits - (normalisers - entropies)[part, None]
                per_softmax = per_softmax - surprise.mul_(grad_entropies[part, None])
            grad = softmax.mul_(per_softmax)
            onehot = grad_logprobs[part] if here is None else torch.where(here[part], grad_logprobs[part], 0.0)
            grad.scatter_add_(1, targets[part], onehot)
            grad = ctx.projection.grad_through(grad, logits).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                _add_product(grad_weight, grad, hidden[part])
            if grad_bias is not None:
                grad_bias.add_(grad.sum(0))
        if ctx.split is not None and grad_hidden is not None:
            ctx.split.sum(grad_hidden)
        return grad_hidden, _cast(grad_weight, weight), _cast(grad_bias, bias), *(None,) * 6


def _add_product(total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    """Do ``total += grad.T @ hidden``, (V, d)."""
    if total.dtype == grad.dtype:
        total.addmm_(grad.T, hidden)
    else:
        total.add_(grad.T @ hidden)


def _cast(grad: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None or like is None else grad.to(like.dtype)
