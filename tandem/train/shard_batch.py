"""Which samples of a batch each rank computes. Pure: deterministic in lengths, order and groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from tandem.algorithms.balance import partition
from tandem.base.errors import ContractError
from tandem.columns.images import IMAGES
from tandem.columns.proto import DataProto
from tandem.train.micro_batches import canonical_order
from tandem.train.objective import Objective

_WHERE_THERE = ("restarts", "group_ids", "sample_index", "prompt_routes", "routes", IMAGES)


def shard_rows(
    lengths: torch.Tensor | Sequence[int], ranks: int, balance: bool, groups: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return the rows of each rank, ascending, (K_r,) int64: every row once, nobody idle while there are as many rows
    as ranks.

    ``lengths`` (B,) are tokens of samples in canonical order. Without ``balance`` ranks get runs of neighbours whose
    counts differ by at most one, with it sums of tokens that are as even as found. ``groups`` (B,): neighbours of one
    id stay together on a rank, and what is counted and balanced is groups.
    """
    if ranks < 1:
        raise ContractError(f"rows can't be sharded over {ranks} ranks: give at least one")
    tokens = torch.as_tensor(lengths, dtype=torch.int64)
    sizes = torch.ones_like(tokens) if groups is None else torch.unique_consecutive(groups, return_counts=True)[1]
    ends = sizes.cumsum(0)
    units = list(zip((ends - sizes).tolist(), ends.tolist(), strict=True))  # a sample or a group, as (start, end)
    if ranks == 1:
        return [torch.arange(len(tokens))]
    shares = _even(units, tokens, ranks) if balance else _runs(len(units), ranks)
    rows = ([row for unit in share for row in range(*units[unit])] for share in shares)
    return [torch.tensor(share, dtype=torch.int64) for share in rows]


def shard_batch(
    batch: DataProto, ranks: int, *, balance: bool, whole_groups: bool, patch_tokens: float = 0.0
) -> list[torch.Tensor]:
    """Return ``shard_rows`` for the rows of ``batch`` in any order; tokens are those of prompt and response.

    ``patch_tokens``: how many tokens take as long as a patch of an image does in the image tower, where the neighbours
    of a group share it: the first of them has its patches.
    """
    order = canonical_order(batch)
    lengths = (batch.ragged("prompts").lengths + batch.ragged("responses").lengths)[order]
    if patch_tokens and IMAGES in batch.non_tensor_batch:
        lengths = lengths + (patch_tokens * _patches(batch, order)).round().long()
    groups = batch.dense("group_ids").cpu()[order] if whole_groups and "group_ids" in batch.batch else None
    return [order[rows] for rows in shard_rows(lengths, ranks, balance, groups)]


def _patches(batch: DataProto, order: torch.Tensor) -> torch.Tensor:
    """Return the patches of each row in ``order`` (B,) that the row before it does not show."""
    shown = [batch.non_tensor_batch[IMAGES][row] for row in order.tolist()]
    fresh = [images if before is not images else None for before, images in itertools.pairwise([None, *shown])]
    return torch.tensor([0 if images is None else len(images.pixels) for images in fresh], dtype=torch.int64)


def forward_columns(batch: DataProto) -> list[str]:
    """Return what a forward reads of ``batch``."""
    there = {*batch.batch, *batch.non_tensor_batch}
    return ["prompts", "responses", "response_mask", *(name for name in _WHERE_THERE if name in there)]


def objective_columns(objective: Objective, batch: DataProto) -> list[str]:
    """Return what ``objective`` gets, of the columns that ``batch`` has or must have."""
    extra = (name for name in objective.optional_columns if name in batch.batch)
    return list(dict.fromkeys(["response_mask", *objective.columns, *extra]))


def _runs(count: int, ranks: int) -> list[range]:
    ends = [count * rank // ranks for rank in range(ranks + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def _even(units: list[tuple[int, int]], tokens: torch.Tensor, ranks: int) -> list[list[int]]:
    if len(units) <= ranks:
        return [[rank] if rank < len(units) else [] for rank in range(ranks)]
    before = [0, *tokens.cumsum(0).tolist()]
    return partition([before[end] - before[start] for start, end in units], ranks)
