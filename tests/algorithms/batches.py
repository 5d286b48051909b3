"""Random batches for the property tests of ``tandem.algorithms``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

PER_SAMPLE = ("group_ids", "components")


@dataclass(frozen=True)
class Batch:
    """B samples, padded to T, and what is given once per sample: what a policy loss and an estimator see."""

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    token_rewards: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor
    mask: torch.Tensor
    group_ids: torch.Tensor
    components: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], torch.Tensor], *, tokens_only: bool = True) -> Batch:
        """The batch with ``change`` applied to the columns of tokens, or to all."""
        names = [name for name in vars(self) if not (tokens_only and name in PER_SAMPLE)]
        return replace(self, **{name: change(getattr(self, name)) for name in names})

    def rows(self, order: torch.Tensor) -> Batch:
        """The samples ``order``, in that order."""
        return self.map(lambda column: column[order], tokens_only=False)

    def padded(self, extra: int, fill: float) -> Batch:
        """``extra`` more masked columns that hold ``fill``."""

        def widen(column: torch.Tensor) -> torch.Tensor:
            value = False if column.dtype == torch.bool else fill
            return torch.nn.functional.pad(column, (0, extra), value=value)

        return self.map(widen)

    def with_masked(self, fill: float) -> Batch:
        """Every masked entry replaced by ``fill``."""

        def poison(column: torch.Tensor) -> torch.Tensor:
            return column if column.dtype == torch.bool else torch.where(self.mask, column, fill)

        return self.map(poison)


@st.composite
def batches(draw: st.DrawFn, *, groups: int = 3, empty: bool = True) -> Batch:
    """2 to 12 float64 samples of up to ``groups`` prompts in any order, with holes and, if ``empty``, masked rows."""
    samples = draw(st.integers(2, 12))
    width = draw(st.integers(1, 6))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(samples, width, generator=random) < draw(st.sampled_from([0.4, 0.8, 1.0]))
    if not empty:
        mask[:, 0] = True
    if int(mask.sum()) < 2:
        mask[:2, 0] = True

    def noise(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(samples, width, dtype=torch.float64, generator=random)

    old = -noise().abs()
    return Batch(
        logprobs=old + noise(0.3),
        old_logprobs=old,
        rollout_logprobs=old + noise(0.3),
        advantages=noise(),
        token_rewards=noise(),
        values=noise(),
        weights=noise().exp(),
        mask=mask,
        group_ids=torch.randint(0, groups, (samples,), generator=random) * 1_000_003,
        components=torch.randn(samples, 2, dtype=torch.float64, generator=random),
    )


def splits(samples: int, parts: int) -> list[torch.Tensor]:
    """``samples`` row numbers in at most ``parts`` contiguous slices."""
    return list(torch.arange(samples).tensor_split(min(parts, samples)))
