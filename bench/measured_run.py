"""A run of Tandem, with the processor seconds of its steps: what the other benches call, in a process of its own.

Takes the words of ``tandem train``, runs the built-in loop, prints one JSON object as its last line:

``cpu_per_step``  all that this process and its scoring processes do from one step to the next, logging included,
                  evaluation not; ``--skip=N`` as the first word leaves the first N steps out
``parts``         processor seconds per step of this process for rollout, train, ...
``children``      processor seconds per step of the scoring processes
``rewards, lengths``  mean reward and mean length of each step;  ``evals``  the held-out rewards, first to last

Needs ``psutil``, which comes with ``peft``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil

from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.control.colocate import train_colocate
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.plan.plan import compile_plan
from tandem.session.build.run import build_session


def measured_run(words: Sequence[str], skip: int = 0) -> dict[str, Any]:
    """Train as ``tandem train WORDS`` does; steps after the first ``skip`` are what is measured."""
    config = load_words(words, Config)
    session = build_session(config, compile_plan(config))
    last = session.run.progress.last
    with session.run.running():
        if skip:
            session.run.progress.last = skip
            train_colocate(session)
            session.run.progress.last = last
        own, scoring = time.process_time(), children_seconds()
        train_colocate(session)
        own, scoring = time.process_time() - own, children_seconds() - scoring
    rows = read_rows(Path(config.trainer.output_dir) / METRICS_FILE)
    steps = [row for row in rows if "reward/mean" in row]
    counted = [row for row in rows if int(str(row["step"])) > skip]
    own -= sum(numbers(counted if skip else rows, "cpu/evaluation"))
    count = last - skip
    parts = dict.fromkeys(key for row in counted for key in row if key.startswith("cpu/"))
    return {
        "cpu_per_step": (own + scoring) / count,
        "children": scoring / count,
        "parts": {
            key.removeprefix("cpu/"): sum(numbers(counted, key)) / count
            for key in parts
            if key not in ("cpu/step", "cpu/evaluation")
        },
        "rewards": list(numbers(steps, "reward/mean")),
        "lengths": list(numbers(steps, "length/mean")),
        "evals": list(numbers(rows, "eval/reward")),
    }


def children_seconds() -> float:
    """Processor seconds so far of all processes that this one has started and that run."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return float(sum(each.user + each.system for each in times))


def numbers(rows: Sequence[dict[str, object]], key: str) -> Iterator[float]:
    """The values of ``key`` where there are any."""
    return (float(str(row[key])) for row in rows if row.get(key) is not None)


def main() -> None:
    words = sys.argv[1:]
    skip = int(words.pop(0).removeprefix("--skip=")) if words[0].startswith("--skip=") else 0
    print(json.dumps(measured_run(words, skip)))


if __name__ == "__main__":
    main()
