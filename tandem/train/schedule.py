"""Learning-rate schedules."""

from __future__ import annotations

import math
from typing import Literal

ScheduleKind = Literal["constant", "linear", "cosine"]


def lr_factor(
    kind: ScheduleKind,
    step: int,
    *,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    min_ratio: float = 0.0,
    cycles: float = 0.5,
) -> float:
    """Return what the peak learning rate is multiplied by at update ``step`` (from 0).

    A linear warm-up from 0 over ``warmup_steps`` updates, then constant, or down to ``min_ratio`` along a line or a
    cosine of ``cycles`` periods (a half falls once; each more rises to the peak and falls again). From update
    ``total_steps`` on, which the two that fall need, it is ``min_ratio``. The formulas are those that transformers
    uses, the first update of a warm-up with factor 0 included.
    """
    end = math.inf if kind == "constant" else total_steps
    if end is None:
        raise ValueError(f"schedule {kind!r} needs total_steps")
    if step >= end:
        return min_ratio
    if step < warmup_steps:
        return step / warmup_steps
    if kind == "constant":
        return 1.0
    progress = (step - warmup_steps) / (end - warmup_steps)
    left = 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(2 * math.pi * cycles * progress))
    return min_ratio + (1.0 - min_ratio) * left
