"""Dealing rows to ranks: each once, none idle, whole groups together, tokens even where asked."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.train.shard_batch import shard_batch, shard_rows
from tests.images.tiny import picture

LENGTHS = st.lists(st.integers(1, 500), max_size=40)
RANKS = st.integers(1, 9)


def sums(lengths: list[int], parts: list[torch.Tensor]) -> list[int]:
    return [int(torch.tensor(lengths)[rows].sum()) for rows in parts]


@given(lengths=LENGTHS, ranks=RANKS, balance=st.booleans())
def test_b62_every_row_once_and_nobody_idle_who_need_not_be(lengths: list[int], ranks: int, balance: bool) -> None:
    parts = shard_rows(lengths, ranks, balance)
    assert len(parts) == ranks
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(lengths)))
    assert sum(len(part) > 0 for part in parts) == min(ranks, len(lengths))
    assert all(part.dtype == torch.int64 and part.tolist() == sorted(part.tolist()) for part in parts)


@given(lengths=LENGTHS, ranks=RANKS)
def test_without_balance_ranks_get_runs_of_equal_counts(lengths: list[int], ranks: int) -> None:
    parts = shard_rows(lengths, ranks, balance=False)
    assert [row for part in parts for row in part.tolist()] == list(range(len(lengths)))
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1


@given(lengths=st.lists(st.integers(1, 500), min_size=9, max_size=60), ranks=RANKS)
def test_balanced_ranks_differ_by_no_more_than_the_longest_sample(lengths: list[int], ranks: int) -> None:
    totals = sums(lengths, shard_rows(lengths, ranks, balance=True))
    assert max(totals) - min(totals) <= max(lengths)


@given(sizes=st.lists(st.integers(1, 6), max_size=12), ranks=RANKS, balance=st.booleans(), seed=st.integers(0, 99))
def test_whole_groups_stay_together(sizes: list[int], ranks: int, balance: bool, seed: int) -> None:
    groups = torch.repeat_interleave(torch.arange(len(sizes)) * 7 + 3, torch.tensor(sizes, dtype=torch.int64))
    lengths = torch.randint(1, 50, (len(groups),), generator=torch.Generator().manual_seed(seed))
    parts = shard_rows(lengths, ranks, balance, groups)
    owners = [set(groups[part].tolist()) for part in parts]
    assert sum(len(owner) for owner in owners) == len(sizes)
    assert sum(len(part) for part in parts) == len(groups)
    assert sum(len(owner) > 0 for owner in owners) == min(ranks, len(sizes))


@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (4, 1), (8, 2), (8, 3)])
def test_lognormal_lengths_are_even_within_a_twentieth(ranks: int, seed: int) -> None:
    """32 samples a rank; unless one sample alone exceeds the mean of the ranks."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (200 * torch.randn(32 * ranks, generator=generator).exp()).long().clamp(min=1).tolist()
    assert max(lengths) <= sum(lengths) / ranks
    even, plain = (sums(lengths, shard_rows(lengths, ranks, balance)) for balance in (True, False))
    assert max(even) <= 1.05 * sum(lengths) / ranks
    assert max(even) < max(plain)


@given(seed=st.integers(0, 999), balance=st.booleans(), whole=st.booleans())
def test_what_a_rank_gets_does_not_depend_on_the_order_of_the_batch(
    make_batch: Callable[..., DataProto], seed: int, balance: bool, whole: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(torch.randint(1, 30, (12,), generator=generator).tolist(), group_size=3)
    mixed = batch.reorder(torch.randperm(12, generator=generator))
    for straight, other in zip(
        shard_batch(batch, 3, balance=balance, whole_groups=whole),
        shard_batch(mixed, 3, balance=balance, whole_groups=whole),
        strict=True,
    ):
        assert mixed[other].equals(batch[straight])


def test_balance_counts_the_patches_of_an_image_once_a_group() -> None:
    """Four groups of two samples of equal lengths; the images of the first have as many patches as all others."""
    shown = [picture((6, 6))] * 2 + [picture((2, 6))] * 2 + [picture((2, 6))] * 2 + [picture((2, 6))] * 2
    batch = DataProto(
        {
            "prompts": Ragged.from_rows([torch.arange(3)] * 8),
            "responses": Ragged.from_rows([torch.arange(3)] * 8),
            "group_ids": torch.arange(4).repeat_interleave(2),
            "sample_index": torch.arange(2).repeat(4),
        },
        {"images": shown},
    )
    deal = functools.partial(shard_batch, batch, 2, balance=True, whole_groups=True)
    assert sorted(len(rows) for rows in deal()) == [4, 4]  # by tokens alone
    patches = deal(patch_tokens=100.0)
    assert sorted(rows.tolist() for rows in patches) == [[0, 1], [2, 3, 4, 5, 6, 7]]
    assert sum(int(rows.sum()) for rows in deal(patch_tokens=0.0)) == 28


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ContractError, match="at least one"):
        shard_rows([1, 2], 0, balance=True)
