"""Statistics over the selected entries of padded tensors.

Unselected entries are *replaced* before any arithmetic, never multiplied by zero: a NaN or an infinity in padding can
then reach neither the value nor the gradient, while a NaN in a selected entry stays visible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.base.errors import ContractError
from tandem.base.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


def select(values: torch.Tensor, mask: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
    """Return ``values`` where ``mask`` (bool, same shape), ``fill`` elsewhere; no gradient flows to the replaced
    entries.

    >>> select(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]), fill=-1.0).tolist()
    [1.0, -1.0]
    """
    if mask.dtype != torch.bool:
        raise ContractError(f"a mask has dtype {mask.dtype}: convert it with .bool()")
    if values.shape != mask.shape:
        raise ContractError(f"values have shape {tuple(values.shape)}, their mask {tuple(mask.shape)}: make them equal")
    return torch.where(mask, values, torch.full_like(values, fill))


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the sum over the selected entries, of all or along ``dim``. An empty sum is 0."""
    chosen = select(values, mask)
    return chosen.sum() if dim is None else chosen.sum(dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the mean over the selected entries, of all or along ``dim``. The mean of nothing is 0, not NaN."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_var(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the unbiased variance (divisor ``count - 1``) over all selected entries, a scalar.

    Raises ``ContractError`` for fewer than two entries, where it is undefined.
    """
    count = mask.sum()
    if int(count) < 2:
        raise ContractError(f"the variance of {int(count)} selected values is undefined: select at least two")
    deviation = values - masked_mean(values, mask)
    return masked_sum(deviation.square(), mask) / (count - 1)


def masked_whiten(
    values: torch.Tensor, mask: torch.Tensor, *, keep_mean: bool = False, epsilon: float = 1e-8
) -> torch.Tensor:
    """Return ``values`` shifted to mean 0 and scaled to variance 1 over the selected entries; unselected entries become
    0.

    With ``keep_mean`` only the scale changes. Computed in float64, returned in the dtype of ``values``, so that the
    order of the samples does not show in the result. Raises like ``masked_var``.

    >>> masked_whiten(torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[True, True, False]]))
    tensor([[-0.7071,  0.7071,  0.0000]])
    """
    exact = select(values, mask).double()
    mean = masked_mean(exact, mask)
    white = (exact - mean) * torch.rsqrt(masked_var(exact, mask) + epsilon)
    if keep_mean:
        white = white + mean
    return select(white, mask).to(values.dtype)
