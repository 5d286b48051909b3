"""``tandem runs``: runs one below the other, how each stands, and its newest numbers."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.view.runs import find_runs

NUMBERS = {"reward": ("reward/mean",), "eval": ("eval/reward", "eval/accuracy"), "loss": ("loss/policy", "loss/sft")}
"""Columns, and the metrics of which the first that a run has stands there."""

WIDE = 1000


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
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("run", "state", "step", *NUMBERS, "began", ""):
        table.add_column(name, justify="right" if name in ("step", *NUMBERS) else "left", no_wrap=True)
    for row in rows:
        step = str(row["step"]) if row["of"] is None else f"{row['step']}/{row['of']}"
        numbers = ["" if row[name] is None else f"{row[name]:.4g}" for name in NUMBERS]
        cells = [row["run"], row["state"], step, *numbers, str(row["began"] or "")[:16], row["words"]]
        table.add_row(*(Text(_on_one_line(cell)) for cell in cells))
    written = io.StringIO()
    Console(file=written, width=WIDE).print(table)
    return "".join(f"{line.rstrip()}\n" for line in written.getvalue().splitlines())


def _on_one_line(text: str) -> str:
    """Return text of a run without what would move a terminal's cursor or colour it."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
