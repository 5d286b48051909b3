"""A table of texts, for a terminal or a file."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence

from tandem.base.metric_names import less_is_better

WIDE = 1000


def table(names: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[str] = ()) -> str:
    """Return lines with a head; columns in ``numbers`` stand to the right.

    Text of a run can't move the cursor or colour what comes after it.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False)
    for name in names:
        shown.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*(Text(_on_one_line(cell)) for cell in row))
    written = io.StringIO()
    Console(file=written, width=WIDE).print(shown)
    return "".join(f"{line.rstrip()}\n" for line in written.getvalue().splitlines())


def scored_table(rows: Mapping[str, Mapping[str, float]], chosen: str | None) -> str:
    """Return a table of metrics by the names of checkpoints, with the best marked.

    It is best by ``chosen`` where there is that, else by reward or accuracy.
    """
    names = list(dict.fromkeys(name for metrics in rows.values() for name in metrics))
    by = next(name for name in (chosen, "eval/reward", "eval/accuracy", *names) if name in names)
    sign = -1 if less_is_better(by) else 1
    best = max(rows, key=lambda row: sign * rows[row].get(by, -sign * float("inf")))
    cells = [
        [row, *(f"{found[name]:.4f}" if name in found else "" for name in names), f"best {by}" if row == best else ""]
        for row, found in rows.items()
    ]
    return table(["checkpoint", *names, ""], cells, numbers=names)


def _on_one_line(text: str) -> str:
    """Return text of a run without what would move a terminal's cursor or colour it."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
