"""Fake engines of fixed durations over the real gate and ledger: the limits are reached, and never beaten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import simulate, simulate_scale
from bench.simulate import FULLY_ASYNC, HYBRID, SHAPES, Shape
from bench.simulate_clock import Clock, Process, Signal
from tandem.base.errors import DeadlineError
from tandem.dataflow.tickets import Ticket
from tandem.speed.step_bound import Parts, Setting

CHOSEN = [
    Setting("colocate", rollout=simulate.DEVICES),
    replace(HYBRID, sub_batches=8),
    replace(HYBRID, sub_batches=8, pipelined=True),
    replace(HYBRID, sub_batches=8, staleness=1),
    replace(HYBRID, sub_batches=8, staleness=1, overlap=True),
    replace(HYBRID, sub_batches=8, staleness=2, overlap=True, drains=True, at_once=True),
    replace(FULLY_ASYNC, staleness=1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("setting", CHOSEN, ids=simulate.name_of)
def test_every_mode_reaches_its_limit_in_every_shape(shape: Shape, setting: Setting) -> None:
    small = replace(shape, groups=64, slots=shape.slots // 4)  # a quarter of everything: the parts stay the same
    row = simulate.run(small, setting, steps=16)
    assert 0.97 <= row["fraction"] <= 1 + 1e-9
    assert row["largest_lag"] <= setting.staleness


SECONDS = st.floats(0.0, 4.0, allow_nan=False)


@settings(max_examples=25, deadline=None)
@given(
    parts=st.builds(
        Parts,
        rollout=st.just(0.0),
        train=st.floats(1.0, 40.0),
        reference=SECONDS,
        advantages=SECONDS,
        turns=SECONDS,
        push=SECONDS,
        snapshot=SECONDS,
        broadcast=SECONDS,
        swap=SECONDS,
    ),
    setting=st.sampled_from([*CHOSEN, *(replace(one, staleness=2) for one in CHOSEN if one.mode != "colocate")]),
    longest=st.floats(2.0, 20.0),
    slots=st.integers(1, 4),
)
def test_no_schedule_beats_a_limit_or_breaks_the_bound(
    parts: Parts, setting: Setting, longest: float, slots: int
) -> None:
    """The limits are limits also where the best schedule isn't found: few slots, long samples, slow pushes."""
    row = run_drawn(parts, setting, longest, slots, steps=61)
    assert row["largest_lag"] <= setting.staleness
    assert row["fraction"] <= most(row, setting)


def run_drawn(parts: Parts, setting: Setting, longest: float, slots: int, steps: int) -> dict[str, Any]:
    drawn = simulate.lognormal(1.0, 0.7, longest)
    same = Shape("drawn", parts, lambda ticket: drawn(Ticket(0, ticket.place)), groups=16, samples=2, slots=slots)
    at_once = slots * setting.rollout >= same.groups
    return simulate.run(same, replace(setting, at_once=at_once), steps)


def most(row: dict[str, Any], setting: Setting) -> float:
    """The steps that are timed may begin with partitions that were generated before, as many as the staleness lets."""
    return float(row["timed"] / (row["timed"] - setting.staleness)) + 1e-9


def test_longest_samples_of_two_steps_run_side_by_side_where_the_engines_have_room_for_half_a_step() -> None:
    setting = next(one for one in CHOSEN if one.drains)
    row = run_drawn(Parts(rollout=0.0, train=1.0), setting, longest=6.0, slots=1, steps=600)
    assert 6.0 / row["step"] > 1.01
    assert row["fraction"] <= most(row, setting)


@pytest.mark.long
def test_the_scale_run_accounts_for_every_sample_and_its_memory_stays_flat() -> None:
    row = simulate_scale.run(simulate_scale.Scale(devices=32, groups=200), steps=12)
    accounts = row["accounts"]
    assert accounts["trained"] == 12 * 200 * 8
    assert accounts["produced"] == accounts["trained"] + accounts["queued"] + sum(accounts["dropped"].values())
    assert accounts["dropped"]["equal rewards"] >= 12 * 2 * 8
    early, late = row["objects"][2:5], row["objects"][-3:]
    assert max(late) < 1.05 * max(early)
    assert set(row["cost"]) == {"gate", "ledger", "dispatch", "dealing"}


def test_the_clock_runs_processes_in_the_order_of_their_time() -> None:
    clock, seen = Clock(), []
    signal = Signal(clock)

    def waiter() -> Process[None]:
        yield signal
        seen.append(("woken", clock.now))

    def sleeper() -> Process[None]:
        yield 2.0
        seen.append(("slept", clock.now))
        signal.notify()

    clock.spawn(waiter())
    clock.spawn(sleeper())
    clock.run(lambda: len(seen) == 2)
    assert seen == [("slept", 2.0), ("woken", 2.0)]


def test_a_deadlock_is_an_error_and_not_a_hang() -> None:
    clock = Clock()

    def waiter() -> Process[None]:
        yield Signal(clock)

    clock.spawn(waiter())
    with pytest.raises(DeadlineError, match="nothing will happen"):
        clock.run(lambda: False)
