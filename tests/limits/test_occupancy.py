"""Seconds in which an engine generates, in the time of a fake clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.roles.occupancy import Occupancy


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time."""
    now = [0.0]
    monkeypatch.setattr("tandem.roles.occupancy.time.monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def test_groups_that_overlap_count_once_and_gaps_do_not(clock: Callable[[float], None]) -> None:
    one = Occupancy()
    for at, call, group in (
        (1.0, one.begin, "a"),
        (2.0, one.begin, "b"),
        (4.0, one.end, "a"),
        (5.0, one.end, "b"),
        (8.0, one.begin, "c"),
        (8.5, one.end, "c"),
    ):
        clock(at)
        call(group)
    clock(10.0)
    assert one.take() == (4.5, 3.0)
    assert one.take() == (0.0, 0.0)


def test_what_is_under_way_counts_up_to_each_look(clock: Callable[[float], None]) -> None:
    one = Occupancy()
    one.begin("a")
    clock(2.0)
    assert one.take() == (2.0, 0.0)
    clock(5.0)
    one.end("a")
    clock(9.0)
    assert one.take() == (3.0, 5.0)
