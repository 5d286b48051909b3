"""Balancing by length."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tandem.algorithms.balance import micro_batches, partition, partition_groups, reverse_index, spread
from tandem.base.errors import ContractError

lengths_st = st.lists(st.integers(0, 500), min_size=1, max_size=40)


def covers_once(bins: list[list[int]], items: int) -> bool:
    return sorted(itertools.chain.from_iterable(bins)) == list(range(items)) and all(bins)


@settings(max_examples=80, deadline=None)
@given(lengths=lengths_st, bins=st.integers(1, 8))
def test_every_sequence_lands_in_one_of_the_bins_and_none_is_empty(lengths: list[int], bins: int) -> None:
    assume(len(lengths) >= bins)
    dealt = partition(lengths, bins)
    assert covers_once(dealt, len(lengths))
    assert len(dealt) == bins
    assert dealt == partition(lengths, bins)


@settings(max_examples=60, deadline=None)
@given(per_bin=st.integers(1, 6), bins=st.integers(1, 6), data=st.data())
def test_equal_size_means_equal_counts(per_bin: int, bins: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 500), min_size=per_bin * bins, max_size=per_bin * bins))
    dealt = partition(lengths, bins, equal_size=True)
    assert covers_once(dealt, len(lengths))
    assert {len(bin_) for bin_ in dealt} == {per_bin}


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=2, max_size=8))
def test_no_single_move_or_exchange_improves_the_result(lengths: list[int]) -> None:
    dealt = partition(lengths, 2)
    found = spread(lengths, dealt)
    optimum = min(
        abs(sum(lengths) - 2 * sum(c)) for r in range(1, len(lengths)) for c in itertools.combinations(lengths, r)
    )
    assert optimum <= found <= optimum + max(lengths)
    first, second = dealt
    for give, take in itertools.product(first, second):
        swapped = [[i for i in first if i != give] + [take], [i for i in second if i != take] + [give]]
        assert spread(lengths, swapped) >= found


def test_even_lengths_are_dealt_evenly() -> None:
    assert spread([8, 7, 6, 5, 4], partition([8, 7, 6, 5, 4], 2)) == 0  # greedy alone leaves 4


def test_impossible_partitions_are_refused() -> None:
    with pytest.raises(ContractError, match="3 sequences for 4 bins"):
        partition([1, 2, 3], 4)
    with pytest.raises(ContractError, match="do not divide"):
        partition([1, 2, 3], 2, equal_size=True)


def test_whole_groups_stay_together() -> None:
    lengths, groups = [5, 6, 7, 1, 2, 30, 3, 4], list("aabbccdd")
    dealt = partition_groups(lengths, groups, 2)
    assert covers_once(dealt, 8)
    for group in set(groups):
        members = {i for i, g in enumerate(groups) if g == group}
        assert sum(members <= set(bin_) for bin_ in dealt) == 1


@settings(max_examples=80, deadline=None)
@given(lengths=lengths_st, budget=st.integers(500, 2000), min_count=st.integers(1, 6))
def test_micro_batches_obey_the_budget(lengths: list[int], budget: int, min_count: int) -> None:
    assume(len(lengths) >= min_count)
    dealt = micro_batches(lengths, budget, min_count=min_count)
    assert covers_once(dealt, len(lengths))
    assert all(sum(lengths[i] for i in bin_) <= budget for bin_ in dealt)
    assert len(dealt) >= max(min_count, -(-sum(lengths) // budget))


def test_b62_more_bins_than_tokens_require_are_not_left_empty() -> None:
    assert sorted(map(len, micro_batches([10, 10, 10, 10], 40, min_count=4))) == [1, 1, 1, 1]
    assert sorted(map(len, micro_batches([10, 10, 10, 10], 40))) == [4]
    assert covers_once(micro_batches([0, 0, 0, 1], 40, min_count=3), 4)
    with pytest.raises(ContractError, match="4 sequences for 5 bins"):
        micro_batches([10, 10, 10, 10], 40, min_count=5)


def test_a_tight_budget_is_met_where_even_sums_would_break_it() -> None:
    lengths = [6, 6, 5, 5, 5, 5, 4, 4, 4, 4]
    dealt = micro_batches(lengths, 12)
    assert all(sum(lengths[i] for i in bin_) <= 12 for bin_ in dealt)
    assert covers_once(dealt, 10)
    three_apart = micro_batches([7, 7, 7], 13, min_count=2)
    assert sorted(map(len, three_apart)) == [1, 1, 1]


def test_a_sequence_above_the_budget_is_named() -> None:
    with pytest.raises(ContractError, match="sequence 1 has 50 tokens"):
        micro_batches([10, 50], 40)
    with pytest.raises(ContractError, match="no sequences"):
        micro_batches([], 40)


@given(order=st.permutations(range(7)))
def test_reverse_index_undoes_an_order(order: list[int]) -> None:
    shuffled = [order[i] for i in reverse_index(order)]
    assert shuffled == list(range(7))


def test_many_sequences_are_dealt() -> None:
    lengths = [(i * 7919) % 4096 + 1 for i in range(20_000)]
    assert spread(lengths, partition(lengths, 64)) < 4096
    assert all(sum(lengths[i] for i in bin_) <= 8192 for bin_ in micro_batches(lengths, 8192))
