"""How even the bins come out, on fixed inputs: each heuristic, tie and exchange earns its place here or nowhere.

The numbers are sums over many inputs of what one would like to be small. Who finds a better way writes the smaller one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tandem.algorithms.balance import micro_batches, partition, partition_groups, spread


def lengths_of(seed: int, count: int, largest: int) -> list[int]:
    """Numbers from 1 to ``largest`` with a long tail of large ones, as answers have; the same on every machine."""
    state, found = seed * 7919 + 17, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        part = state / 2**31
        found.append(1 + int(part**3 * largest))
    return found


def inputs(times: int, count: int, largest: int) -> Iterator[list[int]]:
    return (lengths_of(seed, count, largest) for seed in range(times))


def best_spread(lengths: list[int], bins: int, equal_size: bool) -> int:
    """Of all partitions."""
    found = sum(lengths)
    for chosen in itertools.product(range(bins), repeat=len(lengths)):
        counts = [chosen.count(b) for b in range(bins)]
        if min(counts) and (not equal_size or len(set(counts)) == 1):
            sums = [
                sum(length for length, b in zip(lengths, chosen, strict=True) if b == which) for which in range(bins)
            ]
            found = min(found, max(sums) - min(sums))
    return found


@pytest.mark.parametrize(
    ("times", "count", "bins", "equal_size", "total"),
    [
        (60, 8, 2, False, 3965),
        (60, 8, 2, True, 5379),
        (60, 12, 4, False, 10534),
        (60, 12, 4, True, 12537),
        (30, 30, 3, False, 16),
        (30, 30, 5, True, 155),
        (40, 7, 5, False, 22473),
        (20, 24, 1, False, 0),
    ],
)
def test_the_sums_of_bins_are_as_even_as_they_were(
    times: int, count: int, bins: int, equal_size: bool, total: int
) -> None:
    found = [spread(one, partition(one, bins, equal_size=equal_size)) for one in inputs(times, count, 900)]
    assert sum(found) == total


@pytest.mark.parametrize(("bins", "equal_size"), [(2, False), (2, True), (3, False), (3, True)])
def test_of_six_sequences_the_best_of_all_partitions_is_found(bins: int, equal_size: bool) -> None:
    for one in inputs(25, 6, 50):
        assert spread(one, partition(one, bins, equal_size=equal_size)) == best_spread(one, bins, equal_size)


def test_large_inputs_are_dealt_longest_first_alone() -> None:
    lengths = lengths_of(3, 2001, 900)
    assert spread(lengths, partition(lengths, 50)) == 1
    assert spread(lengths[:2000], partition(lengths[:2000], 50)) == 1
    assert spread(lengths[:2000], partition(lengths[:2000], 50, equal_size=True)) == 1


@pytest.mark.parametrize(
    ("budget", "min_count", "bins", "unevenness"),
    [(900, 1, 177, 2473), (1000, 1, 159, 1674), (1300, 6, 240, 10973), (5000, 1, 44, 9)],
)
def test_micro_batches_are_as_few_and_as_even_as_they_were(
    budget: int, min_count: int, bins: int, unevenness: int
) -> None:
    dealt = [(one, micro_batches(one, budget, min_count=min_count)) for one in inputs(40, 16, 890)]
    assert sum(len(found) for _, found in dealt) == bins
    assert sum(spread(one, found) for one, found in dealt) == unevenness


@pytest.mark.parametrize(
    ("lengths", "budget", "dealt"),
    [
        ([2, 2, 8, 6, 3, 3], 12, [[0, 1, 2], [3, 4, 5]]),
        ([8, 6, 8, 5, 11, 9, 5, 4], 19, [[3, 5, 7], [0, 1, 6], [2, 4]]),
    ],
)
def test_even_sums_may_need_fewer_micro_batches_than_the_fullest_bin_that_still_holds_a_sequence(
    lengths: list[int], budget: int, dealt: list[list[int]]
) -> None:
    """The latter way takes one more: 8 and 3, then 6, 3 and 2, and a last one for the other 2."""
    assert micro_batches(lengths, budget) == dealt


def test_a_bin_holds_its_items_in_ascending_order() -> None:
    for one in inputs(20, 15, 900):
        groups = [i // 3 for i in range(15)]
        for dealt in (partition(one, 4), micro_batches(one, 950), partition_groups(one, groups, 5)):
            assert all(bin_ == sorted(bin_) for bin_ in dealt)
