"""Schedules, packings and rows from their definitions: plain Python, nothing of Tandem's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tests.oracle.oracle_file import Case
from tests.oracle.oracle_verdict import Right


def steps_of(key: str) -> range:
    """``lr_at_step_0_to_13`` as a range."""
    first, last = (int(part) for part in key.removeprefix("lr_at_step_").split("_to_"))
    return range(first, last + 1)


def right_schedule(case: Case) -> Right:
    """A line up to the peak, then the shape of the schedule; from its end on the minimum."""
    given = case.inputs
    warmup, floor = given["num_warmup_steps"], given.get("min_lr_ratio") or 0.0
    cycles = given.get("num_cycles")

    def factor(step: int) -> float:
        falls = given["kind"] != "constant"
        if falls and step >= given["num_training_steps"]:
            return floor
        if step < warmup:
            return step / warmup
        if not falls:
            return 1.0
        passed = (step - warmup) / (given["num_training_steps"] - warmup)
        wave = math.cos(2 * math.pi * (0.5 if cycles is None else cycles) * passed)
        return floor + (1 - floor) * (1 - passed if given["kind"] == "linear" else (1 + wave) / 2)

    return {key: [factor(step) for step in steps_of(key)] for key in case.expected if key.startswith("lr_at_step_")}


def fewest_by_first_fit(lengths: Sequence[int], budget: int) -> int:
    """Bins that longest-first, first-fit packing needs: at most 11/9 of the fewest possible, and what is easy."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = next((i for i, left in enumerate(room) if left >= length), None)
        if fits is None:
            room.append(budget - length)
        else:
            room[fits] -= length
    return len(room)


def permutes(order: Any, rows: int) -> bool:
    """Whether each row is named once."""
    return sorted(int(i) % rows for i in order) == list(range(rows)) if rows else not len(order)
