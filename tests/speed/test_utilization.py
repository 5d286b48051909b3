"""Seconds in which an engine works for a partition, in the time of a fake clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.dataflow.tickets import Ticket
from tandem.roles.rollout.utilization import StepClock, Utilization, Work

Clock = Callable[[float], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets the time."""
    now = [0.0]
    monkeypatch.setattr("tandem.roles.rollout.utilization.time.perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def test_groups_that_overlap_count_once_and_gaps_do_not(clock: Clock) -> None:
    one = Utilization()
    for at, call, place in (
        (1.0, one.begin, 0),
        (2.0, one.begin, 1),
        (4.0, one.end, 0),
        (5.0, one.end, 1),
        (8.0, one.begin, 2),
        (8.5, one.end, 2),
    ):
        clock(at)
        call(Ticket(0, place))
    clock(10.0)
    assert one.take(0) == Work(1.0, 8.5, 4.5, 3.0)
    assert one.take(0) is None


def test_partitions_in_flight_together_share_the_time_by_their_groups(clock: Clock) -> None:
    one = Utilization()
    one.begin(Ticket(0, 0))
    one.begin(Ticket(0, 1))
    one.begin(Ticket(1, 0))
    clock(3.0)
    one.end(Ticket(0, 0))
    one.end(Ticket(0, 1))
    assert one.take(0) == Work(0.0, 3.0, 2.0, 3.0)
    clock(5.0)
    one.end(Ticket(1, 0))
    assert one.take(1) == Work(0.0, 5.0, 3.0, 5.0)


def test_what_a_dead_engine_left_is_forgotten_with_its_partition(clock: Clock) -> None:
    one = Utilization()
    one.begin(Ticket(0, 0))
    clock(2.0)
    assert one.take(0) == Work(0.0, 0.0, 2.0, 0.0)
    clock(7.0)
    one.end(Ticket(0, 0))
    one.begin(Ticket(1, 0))
    clock(8.0)
    one.end(Ticket(1, 0))
    assert one.take(1) == Work(7.0, 8.0, 1.0, 1.0)


def test_a_dead_engine_generates_nothing(clock: Clock) -> None:
    one = Utilization()
    one.begin(Ticket(0, 0))
    one.begin(Ticket(1, 0))
    clock(2.0)
    one.abandon()
    clock(7.0)
    one.end(Ticket(1, 0))
    assert one.take(0) == Work(0.0, 0.0, 1.0, 0.0)
    assert one.take(1) == Work(0.0, 0.0, 1.0, 0.0)


def test_what_is_generated_between_steps_is_not_counted(clock: Clock) -> None:
    """A group begins in a step, lives through an evaluation of 10 s, and ends in the next step."""
    steps = StepClock()
    one = Utilization(steps)
    clock(1.0)
    with steps.running():
        clock(2.0)
        one.begin(Ticket(0, 0))
        clock(3.0)
    clock(13.0)
    assert steps() == 2.0
    with steps.running():
        clock(17.0)
        one.end(Ticket(0, 0))
        assert steps() == 6.0
    assert one.take(0) == Work(2.0, 17.0, 5.0, 5.0)


def test_a_look_tells_what_was_done_since_the_last_for_whichever_partition(clock: Clock) -> None:
    one = Utilization()
    one.begin(Ticket(0, 0))
    one.begin(Ticket(1, 0))
    clock(2.0)
    one.end(Ticket(0, 0))
    clock(3.0)
    assert one.look() == (3.0, 2.0)
    clock(4.0)
    one.end(Ticket(1, 0))
    clock(9.0)
    assert one.look() == (1.0, 4.0)
    assert one.look() == (0.0, 0.0)


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_the_shares_add_up_to_the_time_at_work(events: list[tuple[float, int, int]]) -> None:
    now, busy = 0.0, 0.0
    one, running = Utilization(), set[Ticket]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.roles.rollout.utilization.time.perf_counter", lambda: now)
        for pause, partition, place in events:
            busy, now = busy + pause * bool(running), now + pause
            ticket = Ticket(partition, place)
            (one.end if ticket in running else one.begin)(ticket)
            running ^= {ticket}
        works = [one.take(partition) for partition in reversed(range(4))]
    assert sum(work.seconds for work in works if work is not None) == pytest.approx(busy)
