"""A head whose rows are spread over ranks: each has some tokens of the vocabulary, and they meet for the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class SplitVocabulary:
    """This rank's part of a vocabulary that is split over the ranks of ``group``: ``rows`` ids from ``first`` on.

    ``holes`` (H,) int64 are those of its rows, counted from 0, that are no tokens. Every method but ``own`` is a
    meeting of the ranks, and gives all of them the same.
    """

    group: dist.ProcessGroup
    first: int
    rows: int
    holes: torch.Tensor | None = None

    def own(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of ``ids`` here, 0 for those of other ranks, and (bool) which are here; both shaped alike."""
        here = (ids >= self.first) & (ids < self.first + self.rows)
        return torch.where(here, ids - self.first, 0), here

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values`` over the ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def share(self, normalisers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-sum-exps of all logits from those of this rank's (N,), and the log of this rank's share."""
        highest = normalisers.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, self.group)
        whole = highest + self.sum((normalisers - highest).exp()).log()
        return whole, normalisers - whole

    def joined(
        self, logprobs: torch.Tensor, here: torch.Tensor, normalisers: torch.Tensor, entropies: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log-probs (N, K), log-sum-exps (N,) and entropies (N,) of the whole distribution.

        Given are those of the distribution over this rank's tokens alone; ``here`` (N, K) says which log-probs are of
        its tokens. ``entropies`` may be empty, where none are wanted.
        """
        whole, share = self.share(normalisers)
        chosen = self.sum(torch.where(here, logprobs + share[:, None], 0.0))
        if len(entropies):
            entropies = self.sum(share.exp() * (entropies - share))
        return chosen, whole, entropies

    def best(self, values: torch.Tensor, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ``count`` largest of all ranks' ``values`` with their ``ids``, (N, count) each, falling.

        Each rank gives (N, k), with one k for all.
        """
        ranks = dist.get_world_size(self.group)
        parts = [[torch.empty_like(tensor) for _ in range(ranks)] for tensor in (values, ids)]
        for part, tensor in zip(parts, (values, ids), strict=True):
            dist.all_gather(part, tensor.contiguous(), group=self.group)
        found = torch.cat(parts[0], dim=1).topk(count, dim=1)
        return found.values, torch.cat(parts[1], dim=1).gather(1, found.indices)
