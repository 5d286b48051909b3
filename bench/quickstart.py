"""The quickstart's training against the hand-written program ``plain_grpo.py``: what it learns and what it costs.

Both start from the same exported SFT weights, with the same settings and seed, one thread, in turn. SFT weights are
made once per seed with ``examples/quickstart/sft.yaml`` and kept in ``--out``, or ``--weights`` names one folder for
all. Writes ``quickstart.json`` and prints a table. Run: ``python bench/quickstart.py [--seeds 0 1 2] [--steps 150]``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
CONFIG = "examples/quickstart/grpo.yaml"
WINDOW = 10
"""Steps whose mean reward is the first and the last point of a curve."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--weights", type=Path, help="an exported SFT model for every seed; default: one SFT per seed")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/quickstart"))
    args = parser.parse_args()
    out = args.out.resolve()
    rows = []
    for seed in args.seeds:
        weights = args.weights.resolve() if args.weights else sft_weights(out, seed)
        plain = run_plain(weights, seed, args.steps, out / f"plain_{seed}.json")
        tandem = run_tandem(weights, seed, args.steps, out / f"grpo_{seed}")
        rows.append({"seed": seed, "tandem": tandem, "plain": plain})
        print(as_row(rows[-1]), flush=True)
    result = {"steps": args.steps, "runs": rows, "summary": summary(rows)}
    (out / "quickstart.json").write_text(json.dumps(result, indent=2) + "\n")
    print(as_table(rows))
    print(json.dumps(result["summary"]))


def sft_weights(out: Path, seed: int) -> Path:
    """The exported SFT model of ``seed``; made if it isn't there."""
    run = out / f"sft_{seed}"
    if not (run / "final").is_dir():
        words = ["examples/quickstart/sft.yaml", f"trainer.seed={seed}", f"trainer.output_dir={run}"]
        python("-m", "tandem", "sft", *words)
    return run / "final"


def run_plain(weights: Path, seed: int, steps: int, out: Path) -> dict[str, Any]:
    """Learning curve and cost of the hand-written program."""
    out.parent.mkdir(parents=True, exist_ok=True)
    words = ["--weights", weights, "--seed", seed, "--steps", steps, "--out", out]
    python(BENCH / "plain_grpo.py", *words)
    log = json.loads(out.read_text())
    return curve([row["reward"] for row in log["log"]], log["greedy"], log["cpu_per_step"])


def run_tandem(weights: Path, seed: int, steps: int, out: Path) -> dict[str, Any]:
    """Learning curve and cost of ``tandem train``."""
    words = [
        f"actor_rollout_ref.model.path={weights}",
        f"trainer.seed={seed}",
        f"trainer.total_steps={steps}",
        f"trainer.output_dir={out}",
        f"evaluation.interval={steps}",
    ]
    run = json.loads(python(BENCH / "measured_run.py", CONFIG, *words).splitlines()[-1])
    result = curve(run["rewards"], run["evals"][-1], run["cpu_per_step"])
    return {**result, "parts": run["parts"], "children": run["children"]}


def python(*words: object) -> str:
    """What a Python program with one thread, started in the project's folder, prints."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def curve(rewards: list[float], greedy: float, cpu_per_step: float) -> dict[str, Any]:
    """First and last mean reward, greedy accuracy on the held-out sums, processor seconds per step."""
    first, last = fmean(rewards[:WINDOW]), fmean(rewards[-WINDOW:])
    return {"first": first, "last": last, "gain": last - first, "greedy": greedy, "cpu_per_step": cpu_per_step}


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the seeds, the smallest gain, and the ratio of the costs."""
    tandem, plain = [row["tandem"] for row in rows], [row["plain"] for row in rows]
    return {
        "last_tandem": fmean(run["last"] for run in tandem),
        "last_plain": fmean(run["last"] for run in plain),
        "smallest_gain": min(run["gain"] for run in tandem),
        "cpu_ratio": fmean(run["cpu_per_step"] for run in tandem) / fmean(run["cpu_per_step"] for run in plain),
    }


def as_table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table, Tandem / plain in each cell."""
    head = (
        "| seed | reward, first steps | reward, last steps | greedy | processor s per step | ratio |\n"
        + "|---" * 6
        + "|"
    )
    return "\n".join([head, *map(as_row, rows)])


def as_row(row: dict[str, Any]) -> str:
    tandem, plain = row["tandem"], row["plain"]
    cells = [f"{tandem[key]:.3f} / {plain[key]:.3f}" for key in ("first", "last", "greedy", "cpu_per_step")]
    return f"| {row['seed']} | {' | '.join(cells)} | {tandem['cpu_per_step'] / plain['cpu_per_step']:.2f} |"


if __name__ == "__main__":
    main()
