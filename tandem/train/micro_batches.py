"""Cutting a mini-batch into micro-batches that fit a token budget. Never changes a result beyond rounding."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto


def canonical_order(batch: DataProto) -> torch.Tensor:
    """Return the row numbers (B,) by group id, then index in the group; without these columns the batch's own order."""
    order = torch.arange(len(batch))
    for column in ("sample_index", "group_ids"):
        if column in batch.batch:
            order = order[torch.argsort(batch.dense(column).cpu()[order], stable=True)]
    return order


def token_budgeted(
    batch: DataProto,
    max_tokens: int,
    *,
    max_samples: int | None = None,
    whole_groups: bool = False,
    padded: bool = False,
) -> Iterator[slice]:
    """Yield runs of neighbouring samples with at most ``max_tokens`` prompt and response tokens each.

    ``max_samples`` bounds their number too, where one group isn't larger than that. Tokens of a shared prompt count for
    each sample: attention gathers them for each. ``padded``: each sample counts as the longest beside it.
    ``whole_groups``: neighbours of one group id are not parted.
    """
    lengths = batch.ragged("prompts").lengths + batch.ragged("responses").lengths

    def cost(run: slice) -> int:
        return int(lengths[run].max()) * (run.stop - run.start) if padded else int(lengths[run].sum())

    units = list(group_by_group(batch)) if whole_groups else [slice(i, i + 1) for i in range(len(lengths))]
    first = 0
    for unit in units:
        if cost(unit) > max_tokens:
            what = f"sample {unit.start}" if unit.stop - unit.start == 1 else f"the group of sample {unit.start}"
            raise ContractError(
                f"{what} has {cost(unit)} tokens, a micro-batch holds {max_tokens}: raise the token budget "
                "(ppo_max_token_len_per_gpu) or shorten prompts and responses"
            )
        crowded = max_samples is not None and unit.stop - first > max_samples
        if first < unit.start and (crowded or cost(slice(first, unit.stop)) > max_tokens):
            yield slice(first, unit.start)
            first = unit.start
    yield slice(first, len(lengths))


def group_by_group(batch: DataProto) -> Iterator[slice]:
    """Yield one run of neighbouring samples per group, so that a group is computed alike whatever stands beside it."""
    ids = batch.dense("group_ids").cpu()
    sizes = torch.unique_consecutive(ids, return_counts=True)[1].tolist()
    first = 0
    for size in sizes:
        yield slice(first, first + size)
        first += size
