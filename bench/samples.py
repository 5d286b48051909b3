"""What keeping all samples costs a step of the loop, as the quickstart makes them.

Two runs from the same weights, with and without ``trainer.samples``, go step by step in turn, so that a busy machine
is busy for both. Prints the seconds from step to step with and without (medians), their ratio, and what the loop itself
spends on handing samples over. Run: ``python bench/samples.py --weights FOLDER [--steps 40]``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.control.colocate import train_colocate
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.plan.plan import compile_plan
from tandem.session.build.run import build_session

CONFIG = "examples/quickstart/grpo.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True, help="such as runs/quickstart/sft/final")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        runs = {every: steps(args.weights, args.steps, every, Path(out) / f"every_{every}") for every in (0, 1)}
        seconds: dict[int, list[float]] = {0: [], 1: []}
        for step in range(args.steps):
            for every in sorted(runs, reverse=bool(step % 2)):
                begun = time.perf_counter()
                next(runs[every])
                seconds[every].append(time.perf_counter() - begun)
        for run in runs.values():
            run.close()
        rows = read_rows(Path(out) / "every_1" / METRICS_FILE)
    without, kept = (median(seconds[every][2:]) for every in (0, 1))
    handed = median(float(str(row["time/samples"])) for row in rows[2:] if "time/samples" in row)
    print(json.dumps({"without_s": without, "kept_s": kept, "ratio": kept / without, "time/samples": handed}))


def steps(weights: Path, count: int, every: int, out: Path) -> Iterator[None]:
    """Train, and stop after each step; the run is left where the iterator is closed."""
    words = [
        CONFIG,
        f"actor_rollout_ref.model.path={weights}",
        f"trainer={{total_steps: {count}, max_idle_steps: {count}, logger: []}}",
        f"trainer.samples.every={every}",
        f"trainer.output_dir={out}",
        "evaluation={interval: 0, at_start: false}",
    ]
    config = load_words(words, Config)
    session = build_session(config, compile_plan(config))
    with session.run.log:
        for step in range(1, count + 1):
            session.run.progress.last = step
            train_colocate(session)
            yield


if __name__ == "__main__":
    sys.exit(main())
