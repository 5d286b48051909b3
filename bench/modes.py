"""The three modes side by side on one task, from one checkpoint: the parts of a step, its limit, and what they reach.

Each run is a ``tandem train`` of its own, one after the other. The streaming modes work in two processes of one thread
each; colocate, on as many cores, in one process of two threads or of one, whichever is faster. The parts and the limit
of a run are its own (``tandem.topology.measured``); the reward is the mean of the last steps. Prints a Markdown table
and one JSON line, and writes ``modes.json`` into ``--out``. Run from the project's folder:

``python -m bench.modes --weights runs/quickstart/sft/final [--steps 100] [--seeds 0 1 2] [KEY=VALUE ...]``
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.topology.limits import perfect_step
from tandem.topology.measured import read_measured

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 10
"""Steps whose mean reward stands for the end of a run."""

MODES: dict[str, tuple[str, ...]] = {
    "colocate": ("execution.mode=colocate", "runtime.torch_threads=2"),
    "colocate_1_thread": ("execution.mode=colocate", "runtime.torch_threads=1"),
    "hybrid": (
        "execution.mode=hybrid",
        'execution.resource={"actor":[1,1],"rollout":[1,1]}',
        "execution.max_staleness=1",
        "execution.num_iters_per_train_update=4",
        "runtime.torch_threads=1",
    ),
    "fully_async": (
        "execution.mode=fully_async",
        "execution.max_staleness=1",
        "execution.num_iters_per_train_update=4",
        "runtime.torch_threads=1",
    ),
}
TURNS = ("colocate", "colocate_1_thread")
"""What hybrid is compared with."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="changes to the config of every run")
    parser.add_argument("--weights", type=Path, required=True, help="a Hugging Face folder that every run starts from")
    parser.add_argument("--config", type=Path, default=ROOT / "examples/quickstart/grpo.yaml")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/modes"))
    args = parser.parse_args()
    out = args.out.resolve()
    rows = []
    for seed in args.seeds:
        for mode in args.modes:
            common = [
                f"actor_rollout_ref.model.path={args.weights.resolve()}",
                f"trainer.seed={seed}",
                f"trainer.total_steps={args.steps}",
                f"trainer.output_dir={out / f'{mode}_{seed}'}",
            ]
            train([str(args.config), *common, *MODES[mode], *args.words])
            rows.append({"mode": mode, "seed": seed, **reading(out / f"{mode}_{seed}")})
            print(as_row(rows[-1]), flush=True)
    result = {"steps": args.steps, "runs": rows, "summary": summary(rows)}
    (out / "modes.json").write_text(json.dumps(result, indent=2) + "\n")
    print(as_table(rows))
    print(json.dumps(result["summary"]))


def train(words: Sequence[str]) -> None:
    """``tandem train WORDS`` in a process that ends well."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tandem", "train", *words]
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)


def reading(run: Path) -> dict[str, Any]:
    """What a run says: parts of the step, limit, fraction, rewards, lags."""
    measured = read_measured(run)
    rows = read_rows(run / METRICS_FILE)
    rewards, evals = values(rows, "reward/mean"), values(rows, "eval/reward")
    return {
        "step": measured.seconds,
        "parts": asdict(measured.parts),
        "limit": measured.limit.seconds,
        "bound": str(measured.limit.bound),
        "why": str(measured.limit.binding),
        "fraction": measured.fraction,
        "perfect": perfect_step(measured.parts, measured.setting.devices),
        "waited": fmean(values(rows, "time/wait") or [0.0]),
        "lag": fmean(values(rows, "lag/mean")),
        "first": fmean(rewards[:WINDOW]),
        "last": fmean(rewards[-WINDOW:]),
        "eval": evals[-1] if evals else None,
    }


def values(rows: Sequence[dict[str, object]], key: str) -> list[float]:
    """The values of ``key`` where there are any."""
    return [float(str(row[key])) for row in rows if row.get(key) is not None]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds, by mode; and hybrid's step over that of the faster colocate."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    means = {
        mode: {key: fmean(row[key] for row in rows if row["mode"] == mode) for key in ("step", "fraction", "last")}
        for mode in modes
    }
    turns = min((means[mode]["step"] for mode in TURNS if mode in means), default=None)
    ratio = None if turns is None or "hybrid" not in means else means["hybrid"]["step"] / turns
    return {"means": means, "hybrid_over_colocate": ratio}


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of all runs."""
    names = ("mode", "seed", "step, s", "rollout", "forward", "advantages", "train", "push", "limit, s", "reached")
    head = " | ".join([*names, "bound", "lag", "reward, first", "reward, last"])
    return "\n".join([f"| {head} |", "|---" * (len(names) + 4) + "|", *map(as_row, rows)])


def as_row(row: dict[str, Any]) -> str:
    """One run; work in device-seconds."""
    parts = row["parts"]
    push = parts["push"] + parts["turns"] + parts["snapshot"] + parts["broadcast"] + parts["swap"]
    numbers = (parts["rollout"], parts["reference"] + parts["old"], parts["advantages"], parts["train"], push)
    cells = [row["mode"], str(row["seed"]), f"{row['step']:.3f}", *(f"{number:.3f}" for number in numbers)]
    cells += [f"{row['limit']:.3f}", f"{row['fraction']:.3f}", row["bound"]]
    cells += [f"{row[key]:.3f}" for key in ("lag", "first", "last")]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
