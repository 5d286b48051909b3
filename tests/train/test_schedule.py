"""Learning-rate schedules."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.config.model import OptimConfig
from tandem.train.schedule import ScheduleKind, lr_factor
from tandem.train.updater import Updater

FALLING: tuple[ScheduleKind, ...] = ("linear", "cosine")


def test_a_warm_up_rises_in_a_line_to_the_peak() -> None:
    assert [lr_factor("constant", step, warmup_steps=4) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_constant_has_no_end() -> None:
    assert [lr_factor("constant", step, total_steps=2, min_ratio=0.1) for step in (1, 2, 50)] == [1.0, 1.0, 1.0]


def test_cosine_and_linear_fall_to_the_floor() -> None:
    for kind, quarter in (("cosine", 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2), ("linear", 0.1 + 0.9 * 0.75)):
        values = [lr_factor(kind, step, warmup_steps=2, total_steps=14, min_ratio=0.1) for step in (2, 5, 8, 14)]  # type: ignore[arg-type]
        assert values == pytest.approx([1.0, quarter, 0.55, 0.1])


def test_what_falls_needs_an_end() -> None:
    for kind in FALLING:
        with pytest.raises(ValueError, match=f"{kind}.*total_steps"):
            lr_factor(kind, 3)


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 5),
    total=st.integers(6, 40),
    floor=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_after_the_warm_up_a_schedule_never_rises(kind: ScheduleKind, warmup: int, total: int, floor: float) -> None:
    values = [
        lr_factor(kind, step, warmup_steps=warmup, total_steps=total, min_ratio=floor) for step in range(3 * total)
    ]
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
    assert values[warmup] == 1.0
    assert min(values[warmup:]) >= floor


@given(
    kind=st.sampled_from(FALLING),
    warmup=st.integers(0, 9),
    total=st.integers(0, 9),
    floor=st.sampled_from([0.0, 0.2, 1.0]),
    cycles=st.sampled_from([0.5, 1.0, 1.5, 3.0]),
    beyond=st.integers(0, 100),
)
def test_from_its_end_on_a_schedule_is_held_at_the_floor(
    kind: ScheduleKind, warmup: int, total: int, floor: float, cycles: float, beyond: int
) -> None:
    """Also where the end lies in the warm-up, or is the very first update."""
    assert (
        lr_factor(kind, total + beyond, warmup_steps=warmup, total_steps=total, min_ratio=floor, cycles=cycles) == floor
    )


def test_a_cosine_of_more_periods_rises_again_before_its_end() -> None:
    values = [lr_factor("cosine", step, total_steps=12, min_ratio=0.2, cycles=1.5) for step in (0, 4, 8, 10, 12)]
    assert values == pytest.approx([1.0, 0.2, 1.0, 0.6, 0.2])


@pytest.mark.parametrize("kind", FALLING)
def test_an_updater_past_the_end_of_its_schedule_stays_at_the_floor(kind: ScheduleKind) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    updater = Updater([weight], OptimConfig(lr=1e-2, schedule=kind, min_lr_ratio=0.25), total_updates=1)
    rates = []
    for _ in range(4):
        weight.grad = torch.ones_like(weight)
        rates.append(updater.step().lr)
    assert rates == [1e-2, 2.5e-3, 2.5e-3, 2.5e-3]


def test_periods_reach_the_learning_rate() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    updater = Updater([weight], OptimConfig(lr=1e-2, schedule="cosine", num_cycles=1.0), total_updates=4)
    rates = []
    for _ in range(4):
        weight.grad = torch.ones_like(weight)
        rates.append(updater.step().lr)
    assert rates == pytest.approx([1e-2, 5e-3, 0.0, 5e-3])
