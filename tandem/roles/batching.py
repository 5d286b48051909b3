"""How a partition becomes optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tandem.base.seeding import derive_seed
from tandem.columns.proto import DataProto


@dataclass(frozen=True)
class Batching:
    """``epochs`` passes over a partition, in mini-batches of ``groups`` whole groups.

    Of the first ``untrained_steps`` partitions there are none: they are left to a critic that warms up.
    """

    groups: int
    epochs: int
    seed: int
    untrained_steps: int = 0

    def mini_batches(self, batch: DataProto, step: int) -> Iterator[torch.Tensor]:
        """Yield the rows of each mini-batch: a seeded shuffle of whole groups for every pass, from the canonical order.

        Whoever trains on the same partition at the same ``step`` gets the same ones.
        """
        if step < self.untrained_steps:
            return
        groups = batch.dense("group_ids")
        ids = groups.unique()
        if self.groups >= len(ids):
            for _ in range(self.epochs):
                yield torch.arange(len(batch))
            return
        for epoch in range(self.epochs):
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "mini-batches", step, epoch))
            shuffled = ids[torch.randperm(len(ids), generator=generator)]
            for chosen in shuffled.split(self.groups):
                yield torch.isin(groups, chosen).nonzero()[:, 0]
