"""Learning-rate schedules."""

from __future__ import annotations

import math
from typing import Literal

ScheduleKind = Literal["constant", "linear", "cosine"]


def lr_factor(
    kind: ScheduleKind, step: int, *, warmup_steps: int = 0, total_steps: int | None = None, min_ratio: float = 0.0
) -> float:
    """What the peak learning rate is multiplied by at update ``step`` (from 0).

    A linear warm-up from 0 over ``warmup_steps`` updates, then constant, or down to ``min_ratio`` at ``total_steps``
    along a line or half a cosine period. The formulas are those that transformers uses, the first update of a warm-up
    with factor 0 included. ``total_steps`` is needed by the two that fall.
    """
    if step < warmup_steps:
        return step / warmup_steps
    if kind == "constant":
        return 1.0
    if total_steps is None:
        raise ValueError(f"schedule {kind!r} needs total_steps")
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if kind == "linear":
        return max(min_ratio, 1.0 - (1.0 - min_ratio) * progress)
    return max(min_ratio, min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))
