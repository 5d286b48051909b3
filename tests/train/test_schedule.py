"""Learning-rate schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.train.schedule import lr_factor


def test_a_warm_up_rises_in_a_line_to_the_peak() -> None:
    assert [lr_factor("constant", step, warmup_steps=4) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_and_linear_fall_to_the_floor() -> None:
    for kind, middle in (("cosine", 0.55), ("linear", 0.55)):
        values = [lr_factor(kind, step, warmup_steps=2, total_steps=12, min_ratio=0.1) for step in (2, 7, 12)]  # type: ignore[arg-type]
        assert values == pytest.approx([1.0, middle, 0.1])


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 5),
    total=st.integers(6, 40),
    floor=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_after_the_warm_up_a_schedule_never_rises(kind: str, warmup: int, total: int, floor: float) -> None:
    values = [
        lr_factor(kind, step, warmup_steps=warmup, total_steps=total, min_ratio=floor)  # type: ignore[arg-type]
        for step in range(total + 1)
    ]
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
    assert values[warmup] == 1.0
    assert min(values[warmup:]) >= floor
