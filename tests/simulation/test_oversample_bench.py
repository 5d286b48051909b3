"""The bench of spare groups: the time that they save, and the lengths that they leave out."""

from __future__ import annotations

from bench.simulate_oversample import GROUPS, fill


def test_the_first_that_are_done_come_sooner_and_are_shorter() -> None:
    whole, cut = fill(0, 128, seed=0), fill(8, 128, seed=0)
    assert cut.seconds < 0.7 * whole.seconds
    assert cut.taken < 0.9 * cut.asked
    assert whole.taken == whole.asked and whole.made > 0.99 * whole.taken * GROUPS


def test_more_spare_groups_than_slots_change_nothing() -> None:
    """All that is in flight when the last is taken was begun before."""
    assert fill(16, 16, seed=1) == fill(64, 16, seed=1)
