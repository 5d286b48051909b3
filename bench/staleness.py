"""What staleness does to learning and to speed: one config in hybrid mode, from one checkpoint, at several bounds.

Runs ``examples/quickstart/hybrid.yaml`` once for each ``max_staleness`` and seed, one after the other, and prints a
Markdown table: mean reward of the last steps, mean lag, seconds per step and the fraction of the best possible one.
Results are kept in ``staleness.json`` in ``--out``, so that an interrupted bench goes on. Run from the project's
folder: ``python -m bench.staleness --weights runs/quickstart/sft/final [--steps 60] [KEY=VALUE ...]``
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.modes import ROOT, WINDOW, Kept, reading, train

CONFIG = "examples/quickstart/hybrid.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="changes to the config of every run")
    parser.add_argument("--weights", type=Path, required=True, help="a Hugging Face folder that every run starts from")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/staleness"))
    args = parser.parse_args()
    out = args.out.resolve()
    kept = Kept(out / "staleness.json")
    for bound in args.staleness:
        for seed in args.seeds:
            name = f"staleness_{bound}_{seed}"
            words = [
                str(ROOT / CONFIG),
                f"actor_rollout_ref.model.path={args.weights.resolve()}",
                f"execution.max_staleness={bound}",
                f"trainer.seed={seed}",
                f"trainer.total_steps={args.steps}",
                "evaluation.interval=0",
                "evaluation.at_start=false",
                *args.words,
            ]
            if not kept.has(name, words):
                train([*words, f"trainer.output_dir={out / name}"])
                kept.add(name, words, {"staleness": bound, "seed": seed, **reading(out / name)})
    print(as_table(kept.rows(kept.asked)))


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, means over the seeds."""
    head = ("max_staleness", f"reward, first {WINDOW} steps", f"last {WINDOW}", "mean lag", "s per step", "of the best")
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for bound in dict.fromkeys(row["staleness"] for row in rows):
        own = [row for row in rows if row["staleness"] == bound]
        first, last, lag, step, fraction = (
            fmean(row[key] for row in own) for key in ("first", "last", "lag", "step", "fraction")
        )
        lines.append(f"| {bound} | {first:.3f} | {last:.3f} | {lag:.2f} | {step:.3f} | {fraction:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
