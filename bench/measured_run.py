"""A run of Tandem, with the processor seconds of its steps: what the other benches call, in a process of its own.

Takes the words of ``tandem train``, runs the built-in loop, prints one JSON object as its last line:

``cpu_per_step``  everything that this process does from the first step on (logging included, evaluation not), and all
                  that its scoring processes do in their whole life, over the steps; ``--skip=N`` as the first word
                  leaves the first N steps out of the former
``parts``         processor seconds per step of rollout, train, ...
``children``      processor seconds of the scoring processes, their start included
``rewards, lengths``  mean reward and mean length of each step;  ``evals``  the held-out rewards, first to last
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.control import colocate
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.topology.local import build_session
from tandem.topology.plan import compile_plan


def measured_run(words: Sequence[str], skip: int = 0) -> dict[str, Any]:
    """Train as ``tandem train WORDS`` does; steps after the first ``skip`` are what is reported."""
    config = load_words(words, Config)
    session = build_session(config, compile_plan(config))
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    with session.running():
        started = time.process_time()
        colocate.train(session)
        seconds = time.process_time() - started
    rows = read_rows(Path(config.trainer.output_dir) / METRICS_FILE)
    steps, evals = [row for row in rows if "reward/mean" in row], list(numbers(rows, "eval/reward"))
    seconds -= sum(numbers(rows, "cpu/evaluation")) + sum(numbers(steps[:skip], "cpu/step"))
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    scoring = ended.ru_utime + ended.ru_stime - children.ru_utime - children.ru_stime
    counted = steps[skip:]
    parts = [key for key in counted[0] if key.startswith("cpu/") and key not in ("cpu/step", "cpu/evaluation")]
    return {
        "cpu_per_step": (seconds + scoring) / len(counted),
        "children": scoring,
        "parts": {key.removeprefix("cpu/"): sum(numbers(counted, key)) / len(counted) for key in parts},
        "rewards": list(numbers(steps, "reward/mean")),
        "lengths": list(numbers(steps, "length/mean")),
        "evals": evals,
    }


def numbers(rows: Sequence[dict[str, object]], key: str) -> Iterator[float]:
    """The values of ``key`` where there are any."""
    return (float(str(row[key])) for row in rows if row.get(key) is not None)


def main() -> None:
    words = sys.argv[1:]
    skip = int(words.pop(0).removeprefix("--skip=")) if words[0].startswith("--skip=") else 0
    print(json.dumps(measured_run(words, skip)))


if __name__ == "__main__":
    main()
