"""Which checkpoint was best in an evaluation: a note beside them, by which the rotation spares it. No torch here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.base.metric_names import less_is_better
from tandem.train.saved import checkpoints_in

NOTE = "best.json"


@dataclass(frozen=True)
class Best:
    """The best checkpoint: its step, its folder, and the value of the metric."""

    metric: str
    step: int
    value: float
    path: Path


def best_checkpoint(root: Path) -> Best | None:
    """Return the best checkpoint under ``root`` by the note there; None without one. Of equal ones it is the first."""
    metric, values = _read(root)
    there = {step: path for step, path in checkpoints_in(root) if step in values}
    if not there:
        return None
    sign = -1.0 if less_is_better(metric) else 1.0
    step = max(there, key=lambda step: (sign * values[step], -step))
    return Best(metric, step, values[step], there[step])


class BestKept:
    """What a run notes of its evaluations, for ``trainer.keep_best``: ``metric`` after each step that was evaluated.

    ``resumed_step``: the run goes on from there, and evaluates later steps again; None: it begins anew.
    """

    def __init__(self, root: Path, metric: str, resumed_step: int | None = None) -> None:
        self.root, self.metric = root, metric
        noted, values = _read(root)
        goes_on = resumed_step is not None and noted == metric
        self._values = {step: value for step, value in values.items() if goes_on and step <= (resumed_step or 0)}

    def note(self, step: int, evaluated: Mapping[str, float]) -> bool:
        """Note what was found after ``step``; return whether it is better than all before, and so is to be kept.

        It is written before the checkpoint: where a run is killed between the two, the one before is still the best.
        """
        value = evaluated.get(self.metric)
        if value is None or not math.isfinite(value):
            return False
        sign = -1.0 if less_is_better(self.metric) else 1.0
        better = all(sign * value > sign * before for at, before in self._values.items() if at != step)
        self._values[step] = value
        self.root.mkdir(parents=True, exist_ok=True)
        beside = self.root / f"{NOTE}.partial"
        beside.write_text(json.dumps({"metric": self.metric, "values": self._values}), "utf-8")
        os.replace(beside, self.root / NOTE)
        return better


def _read(root: Path) -> tuple[str, dict[int, float]]:
    try:
        found = json.loads((root / NOTE).read_text("utf-8"))
        values = {int(step): float(value) for step, value in found["values"].items()}
        return str(found["metric"]), values
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "", {}
