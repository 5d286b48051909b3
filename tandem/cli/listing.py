"""``tandem runs``: runs one below the other, how each stands, and its newest numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.observe.table import table
from tandem.view.runs import find_runs

NUMBERS = {"reward": ("reward/mean",), "eval": ("eval/reward", "eval/accuracy"), "loss": ("loss/policy", "loss/sft")}
"""Columns, and the metrics of which the first that a run has stands there."""


def runs_words(paths: Sequence[Path], *, as_json: bool = False) -> str:
    """Return the table of the runs that ``paths`` are or hold, as text or as JSON.

    Raises ``DataError`` for a path without any.
    """
    described = []
    for run in find_runs(paths).values():
        run.look()
        described.append(run.describe())
    rows = [_row(found) for found in described]
    return json.dumps(rows, ensure_ascii=False, indent=2) + "\n" if as_json else _table(rows)


def _row(found: Mapping[str, Any]) -> dict[str, Any]:
    steps = found["config"].get("trainer.total_steps")
    began = found["starts"][-1].get("began") if found["starts"] else None
    numbers = {
        name: next((found["last"][key] for key in keys if key in found["last"]), None) for name, keys in NUMBERS.items()
    }
    row = {"run": found["name"], "state": found["state"], "step": found["step"], "of": steps, **numbers}
    return {**row, "began": began, "words": found["words"]}


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = []
    for row in rows:
        step = str(row["step"]) if row["of"] is None else f"{row['step']}/{row['of']}"
        numbers = ["" if row[name] is None else f"{row[name]:.4g}" for name in NUMBERS]
        cells.append([row["run"], row["state"], step, *numbers, str(row["began"] or "")[:16], row["words"]])
    return table(["run", "state", "step", *NUMBERS, "began", ""], cells, numbers=("step", *NUMBERS))
