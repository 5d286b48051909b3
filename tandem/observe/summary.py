"""What is printed of a run at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.base.run_folder import FINAL_FOLDER, REPORT_FILE
from tandem.observe.metrics import METRICS_FILE, Row, read_rows

CURVES = (
    ("reward", "reward/mean"),
    ("held-out reward", "eval/reward"),
    ("accuracy", "eval/accuracy"),
    ("held-out loss", "eval/loss"),
)
"""What is printed of a run at its end, where it has it: (label, metric)."""

_WINDOW = 10


def summarize(output_dir: Path, summary: Mapping[str, str]) -> None:
    """Print the first and last steps of the curve, the run's own ``summary``, and where everything is."""
    rows = read_rows(output_dir / METRICS_FILE)
    for label, key in CURVES:
        values = [float(str(row[key])) for row in rows if row.get(key) is not None]
        if len(values) > 1:
            window = min(_WINDOW, len(values) // 2) if key == "reward/mean" else 1
            first, last = sum(values[:window]) / window, sum(values[-window:]) / window
            span = f" (means of {window} steps)" if window > 1 else ""
            print(f"{label}: {first:.3f} -> {last:.3f}{span}{_of_those_scored(rows, key)}")
    for label, text in summary.items():
        print(f"{label}: {text}")
    print(f"model: {output_dir / FINAL_FOLDER}")
    print(f"report: {output_dir / REPORT_FILE}")


def _of_those_scored(rows: Sequence[Row], key: str) -> str:
    """Return what a mean reward leaves out, where it leaves anything out."""
    shares = [float(str(row[share])) for row in rows if (share := f"{key.partition('/')[0]}/scored_share") in row]
    partial = key in ("reward/mean", "eval/reward") and shares and min(shares) < 1
    return f", of the {sum(shares) / len(shares):.0%} of the answers that were scored" if partial else ""
