"""The critic's loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.algorithms.masked import select
from tandem.algorithms.metric import Metric
from tandem.algorithms.policy_loss import PolicyLoss
from tandem.base.errors import ContractError
from tandem.base.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


def value_loss(
    predictions: torch.Tensor,
    values: torch.Tensor,
    returns: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    cliprange_value: float = 0.5,
) -> PolicyLoss:
    """Return ``max((V - R)^2, (clip(V, V_old +- range) - R)^2) / 2`` per token; all inputs (B, T).

    PPO's clipped value loss (Schulman et al.'s implementation; Engstrom et al., arXiv 2005.12729). Metrics:
    ``value_clipfrac``, ``value_mean``.

    >>> now, before, returns = torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 2.0]])
    >>> value_loss(now, before, returns, torch.tensor([[True, True]]), cliprange_value=0.5).per_token
    tensor([[0.5000, 0.5000]])
    """
    if cliprange_value < 0:
        raise ContractError(f"cliprange_value = {cliprange_value}: write a range that is not negative")
    now, before, target = (select(column, response_mask) for column in (predictions, values, returns))
    bounded = torch.maximum(torch.minimum(now, before + cliprange_value), before - cliprange_value)
    free, clipped = (now - target).square(), (bounded - target).square()
    metrics = {
        "value_clipfrac": Metric.over((clipped > free).float(), response_mask),
        "value_mean": Metric.over(now, response_mask),
    }
    return PolicyLoss(0.5 * torch.maximum(free, clipped), metrics)
