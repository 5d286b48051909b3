"""What the critic minimises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tandem.algorithms.reduce import Aggregation, denominator, loss_numerator
from tandem.algorithms.value_loss import value_loss
from tandem.columns.proto import DataProto
from tandem.train.objective import LossSum, loss_mask, trained_counts


@dataclass(frozen=True)
class ValueObjective:
    """The clipped value loss towards the column ``returns``, within ``cliprange`` of the column ``values``.

    ``cliprange`` infinite: not clipped. ``norm`` is the constant of ``seq-mean-token-sum-norm``.
    """

    cliprange: float = 0.5
    aggregation: Aggregation | str = Aggregation.TOKEN_MEAN
    norm: float | None = None
    columns: tuple[str, ...] = ("values", "returns")
    optional_columns: tuple[str, ...] = ("loss_mask",)
    wants_entropy: bool = False
    needs_entropy: bool = False
    router_coef: float = 0.0
    whole_groups: bool = False

    def numerator(
        self, columns: Mapping[str, torch.Tensor], logprobs: torch.Tensor, entropies: torch.Tensor | None
    ) -> LossSum:
        """Return the value loss, summed; ``logprobs`` are the values that a ``ValueEngine`` reads in their place."""
        del entropies
        mask = loss_mask(columns)
        found = value_loss(logprobs, columns["values"], columns["returns"], mask, cliprange_value=self.cliprange)
        return LossSum(loss_numerator(found.per_token, mask, self.aggregation), dict(found.metrics))

    def denominator(self, batch: DataProto) -> float:
        """Return what the summed loss of the whole mini-batch is divided by, as the aggregation says."""
        return denominator(self.aggregation, trained_counts(batch), norm=self.norm)
