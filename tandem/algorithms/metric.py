"""Metrics that add up: over micro-batches, over ranks, to the value of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.algorithms.masked import masked_sum
from tandem.base.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class Metric:
    """A mean kept as a sum and a count (0-dim tensors, without gradient): parts are added, divided once at the end."""

    sum: torch.Tensor
    count: torch.Tensor

    @classmethod
    def over(cls, values: torch.Tensor, mask: torch.Tensor) -> Metric:
        """Return the mean of ``values`` over the entries that ``mask`` selects (same shape)."""
        return cls(masked_sum(values.detach(), mask), mask.sum())

    def __add__(self, other: Metric) -> Metric:
        return Metric(self.sum + other.sum, self.count + other.count)

    @property
    def mean(self) -> float:
        """The mean of everything added so far; 0 of nothing."""
        return float(self.sum) / max(float(self.count), 1.0)
