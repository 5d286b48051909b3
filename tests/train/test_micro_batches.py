"""Micro-batches cover a batch once, in its order, within the budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ContractError
from tandem.train.micro_batches import canonical_order, group_by_group, token_budgeted

MakeAny = Callable[..., Any]


@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=30), budget=st.integers(24, 90))
def test_runs_cover_every_sample_once_within_the_budget(make_batch: MakeAny, lengths: list[int], budget: int) -> None:
    runs = list(token_budgeted(make_batch(lengths), budget))
    assert [i for run in runs for i in range(run.start, run.stop)] == list(range(len(lengths)))
    tokens = [sum(lengths[run]) + 4 * (run.stop - run.start) for run in runs]
    assert max(tokens) <= budget
    assert all(a + lengths[run.start] + 4 > budget for a, run in zip(tokens, runs[1:], strict=False))


@given(seed=st.integers(0, 999), size=st.integers(1, 5))
def test_canonical_order_is_by_ticket_then_index(make_batch: MakeAny, seed: int, size: int) -> None:
    batch = make_batch([3] * 12, group_size=size)
    mixed = batch.reorder(torch.randperm(12, generator=torch.Generator().manual_seed(seed)))
    assert mixed.reorder(canonical_order(mixed)).equals(batch)


def test_groups_become_runs_of_their_own(make_batch: MakeAny) -> None:
    runs = list(group_by_group(make_batch([3] * 5, group_size=2)))
    assert runs == [slice(0, 2), slice(2, 4), slice(4, 5)]


@given(lengths=st.lists(st.integers(0, 20), min_size=2, max_size=30), budget=st.integers(48, 120))
def test_whole_groups_are_never_parted(make_batch: MakeAny, lengths: list[int], budget: int) -> None:
    batch = make_batch(lengths[: len(lengths) // 2 * 2], group_size=2)
    runs = list(token_budgeted(batch, budget, whole_groups=True))
    assert [i for run in runs for i in range(run.start, run.stop)] == list(range(len(batch)))
    assert all(run.start % 2 == run.stop % 2 == 0 for run in runs)
    assert max(sum(lengths[run]) + 4 * (run.stop - run.start) for run in runs) <= budget


@given(
    lengths=st.lists(st.integers(0, 20), min_size=2, max_size=30), budget=st.integers(48, 120), most=st.integers(1, 9)
)
def test_runs_hold_no_more_samples_than_asked_for(
    make_batch: MakeAny, lengths: list[int], budget: int, most: int
) -> None:
    batch = make_batch(lengths[: len(lengths) // 2 * 2], group_size=2)
    for whole in (False, True):
        runs = list(token_budgeted(batch, budget, max_samples=most, whole_groups=whole))
        assert [i for run in runs for i in range(run.start, run.stop)] == list(range(len(batch)))
        assert max(run.stop - run.start for run in runs) <= max(most, 2 if whole else 1)
        assert max(sum(lengths[run]) + 4 * (run.stop - run.start) for run in runs) <= budget
    assert list(token_budgeted(batch, budget, max_samples=30)) == list(token_budgeted(batch, budget))


def test_a_group_over_the_budget_is_named(make_batch: MakeAny) -> None:
    with pytest.raises(ContractError, match="the group of sample 2 has 26 tokens, a micro-batch holds 20"):
        list(token_budgeted(make_batch([3, 3, 9, 9]), 20, whole_groups=True))
