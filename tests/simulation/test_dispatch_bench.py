"""Groups that take long are begun first: near the bound with true lengths, and well before engines that take turns."""

from __future__ import annotations

import pytest

from bench.simulate_dispatch import PARTITIONS, SEEDS, measure


@pytest.mark.parametrize("partition", PARTITIONS[:2], ids=str)
def test_longest_first_comes_near_the_bound_and_history_is_enough(partition) -> None:  # type: ignore[no-untyped-def]
    found = [measure(partition, seed) for seed in range(SEEDS)]
    assert max(run.longest_first / run.bound for run in found) <= 1.1
    assert sum(run.by_history / run.in_turns for run in found) / SEEDS <= 0.85
    assert min(getattr(run, name) / run.bound for run in found for name in ("by_history", "as_drawn", "in_turns")) >= 1
