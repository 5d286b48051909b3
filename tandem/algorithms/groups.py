"""Statistics per group of samples, keyed by group id.

Position, group size and the way in which a batch was sliced never enter: the id alone says which samples belong
together. All statistics are computed in float64, without a loop over groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.base.errors import ContractError
from tandem.base.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


def countable(
    token_rewards: torch.Tensor, response_mask: torch.Tensor, reward_valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Return (B,) bool: the samples whose score says something about the policy.

    Left out are samples without a trained token (``response_mask`` (B, T) bool) and those whose reward failed:
    ``reward_valid`` (B,) is False, or a reward on a trained token (``token_rewards`` (B, T)) is not finite.
    """
    finite = (token_rewards.isfinite() | ~response_mask).all(dim=-1)
    counted = response_mask.any(dim=-1) & finite
    return counted if reward_valid is None else counted & reward_valid.bool()


@dataclass(frozen=True)
class Groups:
    """The groups of a batch of B samples, G in number.

    ``slot`` (B,) int64 is the group of each sample as a number below G; ``counted`` (B,) bool says which samples enter
    the statistics; ``size`` (G,) float64 counts them per group.
    """

    slot: torch.Tensor
    counted: torch.Tensor
    size: torch.Tensor

    @classmethod
    def of(cls, group_ids: torch.Tensor, counted: torch.Tensor) -> Groups:
        """Return the groups by ``group_ids`` (B,) int64, with statistics over the ``counted`` (B,) samples."""
        if group_ids.shape != counted.shape:
            raise ContractError(
                f"group_ids have shape {tuple(group_ids.shape)} for {len(counted)} samples: give one id per sample"
            )
        ids, slot = torch.unique(group_ids, return_inverse=True)
        size = torch.zeros(len(ids), dtype=torch.float64, device=slot.device)
        return cls(slot, counted, size.index_add(0, slot, counted.double()))

    @property
    def comparable(self) -> torch.Tensor:
        """(B,) bool: samples that count and have a peer that counts. All others get advantage 0."""
        return self.counted & (self.size >= 2)[self.slot]

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values`` (B, ...) over the counted samples of each group: (G, ...) float64."""
        counted = self.counted.reshape(-1, *[1] * (values.dim() - 1))
        exact = torch.where(counted, values.double(), 0.0)
        sums = torch.zeros(len(self.size), *values.shape[1:], dtype=torch.float64, device=values.device)
        return sums.index_add(0, self.slot, exact)

    def lowest(self, values: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """Return the lowest of ``values`` (B, T) per group and place where ``present`` (B, T): (G, T) float64, or
        inf.
        """
        ranked = torch.where(present, values.double(), torch.inf)
        none = torch.full((len(self.size), values.shape[1]), torch.inf, dtype=torch.float64, device=values.device)
        return none.scatter_reduce(0, self.slot.unsqueeze(-1).expand_as(ranked), ranked, "amin")

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of ``values`` (B,) over the counted samples of each group: (G,) float64, 0 for an empty
        group.
        """
        return self.total(values) / self.size.clamp(min=1)

    def deviation(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` (B,) minus the mean of their group: (B,) float64, 0 for samples that do not count."""
        return torch.where(self.counted, values.double() - self.mean(values)[self.slot], 0.0)

    def std(self, values: torch.Tensor) -> torch.Tensor:
        """Return the unbiased standard deviation of ``values`` (B,) per group: (G,) float64, 0 for fewer than two
        samples.
        """
        return (self.total(self.deviation(values).square()) / (self.size - 1).clamp(min=1)).sqrt()
