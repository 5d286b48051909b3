"""Many episodes with slow tools, faults and kills; ``make episodes-2000`` is the same with 2,000 at once."""

from __future__ import annotations

from tests.chaos.episodes import crowd

SOON = ("raises", "exits", "hangs", "nonsense")
"""Faults that cost no process."""


def test_many_episodes_with_faults_and_kills_among_them_are_all_accounted_for() -> None:
    tally = crowd(300, faults=SOON, rounds=1, kills=1, longest=0.4, workers=2)
    assert not tally.wrong
    assert sum(tally.ends.values()) == 300 and tally.ends["scored"] >= 270
    assert all(tally.ends[fault] > 0 for fault in SOON) and tally.turns >= 300
