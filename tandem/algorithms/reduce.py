"""From per-token terms to one number: numerators are summed, and divided once.

``loss_numerator`` gives the sum of a micro-batch, ``count`` its counts. Numerators and counts are added over
micro-batches, ranks and accumulation steps; only then ``denominator`` divides. So no split, shuffle or padding of a
mini-batch can change its loss or gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tandem.algorithms.masked import masked_mean, masked_sum
from tandem.base.errors import ContractError, UnknownNameError
from tandem.base.lazy import LazyModule
from tandem.base.registry import near

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


class Aggregation(StrEnum):
    """How per-token terms become a loss.

    - ``token-mean``: sum over tokens / number of tokens (DAPO, arXiv 2503.14476).
    - ``token-sum``: the sum.
    - ``seq-mean-token-sum``: sum / number of sequences.
    - ``seq-mean-token-mean``: mean of the sequences' means (GRPO, arXiv 2402.03300).
    - ``seq-mean-token-sum-norm``: sum / (number of sequences x a configured constant), the form of Dr. GRPO
      (arXiv 2503.20783) that favours neither short nor long responses.
    """

    TOKEN_MEAN = "token-mean"
    TOKEN_SUM = "token-sum"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"

    @classmethod
    def named(cls, name: str) -> Aggregation:
        """Return the mode called ``name``; an unknown one lists the near ones."""
        known = {str(mode): mode for mode in cls}
        if name not in known:
            raise UnknownNameError(f"unknown loss aggregation {name!r}: {near(name, known)}")
        return known[name]


@dataclass(frozen=True)
class LossCounts:
    """What a mini-batch is divided by: its trained ``tokens`` and the ``sequences`` that have at least one."""

    tokens: int = 0
    sequences: int = 0

    def __add__(self, other: LossCounts) -> LossCounts:
        return LossCounts(self.tokens + other.tokens, self.sequences + other.sequences)


def count(response_mask: torch.Tensor) -> LossCounts:
    """Return the counts of a mask (B, T) bool, to be taken after all masking."""
    return LossCounts(tokens=int(response_mask.sum()), sequences=int(response_mask.any(dim=-1).sum()))


def loss_numerator(per_token: torch.Tensor, response_mask: torch.Tensor, mode: Aggregation | str) -> torch.Tensor:
    """Return the part of the loss, not yet divided, that ``per_token`` (B, T) contributes: a scalar, 0 if all is
    masked.

    >>> terms, mask = torch.tensor([[1.0, 3.0], [4.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    >>> loss_numerator(terms, mask, "token-mean").item() / denominator("token-mean", count(mask))
    2.6666666666666665
    """
    if Aggregation.named(mode) is Aggregation.SEQ_MEAN_TOKEN_MEAN:
        return masked_mean(per_token, response_mask, dim=-1).sum()
    return masked_sum(per_token, response_mask)


def denominator(mode: Aggregation | str, counts: LossCounts, *, norm: float | None = None) -> float:
    """Return what the summed numerators of a whole mini-batch are divided by; never 0.

    ``counts`` are those of all ranks and micro-batches together. ``norm`` is the constant of
    ``seq-mean-token-sum-norm``, usually ``data.max_response_length``; it must come from the config, since the padded
    width of a batch depends on what it was sliced with.

    >>> denominator("seq-mean-token-sum-norm", LossCounts(tokens=300, sequences=4), norm=128)
    512.0
    """
    mode = Aggregation.named(mode)
    if mode is Aggregation.TOKEN_SUM:
        return 1.0
    if mode is Aggregation.TOKEN_MEAN:
        return float(max(counts.tokens, 1))
    sequences = float(max(counts.sequences, 1))
    if mode is not Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
        return sequences
    if norm is None or norm <= 0:
        raise ContractError(f"{mode} with norm = {norm}: give a positive constant, such as data.max_response_length")
    return sequences * norm
