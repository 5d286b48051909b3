"""The three modes side by side on one task, from one checkpoint: the parts of a step, its limit, and what they reach.

Each run is a ``tandem train`` of its own, one after the other. The streaming modes work in two processes of one thread
each; colocate, on as many cores, in one process of two threads or of one, whichever is faster. The parts and the limit
of a run are its own (``tandem.speed.measured``); the reward is the mean of the last steps. Prints a Markdown table
and what follows from it: hybrid's step over colocate's with the reason, and how far the final rewards of modes and
runtimes lie apart. What is measured is kept run by run in ``modes.json`` in ``--out``: an interrupted bench goes on
where it was, and runs that are there are not run again. Run from the project's folder:

``python -m bench.modes --weights runs/quickstart/sft/final``            the three modes on the quickstart's task
``python -m bench.modes --weights ... --seeds 0 1 2 --runtimes local ray --steps 150``     what they come to in the end
``python -m bench.modes --task smollm2 --weights models/smollm2-135m``   work of equal lengths, on a real model
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.speed.measured import read_measured
from tandem.speed.step_bound import perfect_step

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
        "actor_rollout_ref.rollout.on_weight_update=keep",
        "runtime.torch_threads=1",
    ),
    "fully_async": (
        "execution.mode=fully_async",
        "execution.max_staleness=1",
        "execution.num_iters_per_train_update=4",
        "actor_rollout_ref.rollout.on_weight_update=keep",
        "runtime.torch_threads=1",
    ),
}
TURNS = ("colocate", "colocate_1_thread")
"""What hybrid is compared with."""

STREAMING = ("colocate_1_thread", "hybrid", "fully_async")
"""What is compared on other runtimes than the local one: there a role is a process of one thread."""


@dataclass(frozen=True)
class Task:
    """A config, changes to it, and how many steps tell enough."""

    config: str
    words: tuple[str, ...]
    steps: int


TASKS = {
    "quickstart": Task("examples/quickstart/grpo.yaml", (), 60),
    # Few samples of many tokens: decoding them takes about as long as training on them.
    "smollm2": Task(
        "examples/smollm2/addition.yaml",
        (
            "data.train_batch_size=4",
            "actor_rollout_ref.rollout={name: hf, n: 2, ignore_eos: true}",
            "data.max_response_length=48",
            "evaluation.interval=0",
            "evaluation.at_start=false",
        ),
        8,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="changes to the config of every run")
    parser.add_argument("--weights", type=Path, required=True, help="a Hugging Face folder that every run starts from")
    parser.add_argument("--task", choices=TASKS, default="quickstart")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--runtimes", nargs="+", choices=("local", "ray"), default=["local"])
    parser.add_argument("--steps", type=int, help="of a run; default: what the task needs to be measured")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/modes"))
    args = parser.parse_args()
    task, out = TASKS[args.task], args.out.resolve()
    steps = task.steps if args.steps is None else args.steps
    kept = Kept(out / "modes.json")
    for seed in args.seeds:
        for runtime, mode in cases(args.runtimes, args.modes):
            name = f"{args.task}_{mode}_{runtime}_{seed}"
            words = [
                str(ROOT / task.config), f"actor_rollout_ref.model.path={args.weights.resolve()}", *task.words,
                f"trainer.seed={seed}", f"trainer.total_steps={steps}", f"runtime.name={runtime}", *MODES[mode],
                *args.words,
            ]  # fmt: skip
            if not kept.has(name, words):
                train([*words, f"trainer.output_dir={out / name}"])
                label = {"task": args.task, "mode": mode, "runtime": runtime, "seed": seed}
                kept.add(name, words, {**label, **reading(out / name)})
            print(as_row(kept.rows([name])[0]), flush=True)
    rows = kept.rows(kept.asked)
    print(as_table(rows))
    for line in conclusions(rows):
        print(line)


def cases(runtimes: Sequence[str], modes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(runtime, mode) of each run."""
    for runtime in runtimes:
        for mode in modes:
            if runtime == "local" or mode in STREAMING:
                yield runtime, mode


class Kept:
    """Results by run, in a file that is whole after each of them. ``asked`` are the runs of this call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.asked: list[str] = []

    def has(self, name: str, words: Sequence[str]) -> bool:
        """Whether the run with these very words was measured."""
        self.asked.append(name)
        return name in self._runs and self._runs[name]["words"] == list(words)

    def add(self, name: str, words: Sequence[str], row: dict[str, Any]) -> None:
        """Keep a run."""
        self._runs[name] = {"words": list(words), "row": row}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(".partial")
        beside.write_text(json.dumps(self._runs, indent=2) + "\n")
        beside.replace(self._path)

    def rows(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """What those runs came to."""
        return [self._runs[name]["row"] for name in names]


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


def means(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """(mode, runtime) -> means over the seeds."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["mode"], row["runtime"]), []).append(row)
    return {
        case: {key: fmean(row[key] for row in group) for key in ("step", "limit", "fraction", "first", "last")}
        for case, group in groups.items()
    }


def conclusions(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What the runs say together, in lines."""
    found = means(rows)
    turns = {mode: found[mode, "local"]["step"] for mode in TURNS if (mode, "local") in found}
    if turns and ("hybrid", "local") in found:
        fastest = min(turns, key=lambda mode: turns[mode])
        step = found["hybrid", "local"]["step"]
        yield f"hybrid / {fastest}: {step / turns[fastest]:.3f} ({step:.3g} s / {turns[fastest]:.3g} s a step)"
        for mode in ("hybrid", fastest):
            row = next(row for row in rows if (row["mode"], row["runtime"]) == (mode, "local"))
            yield f"  {mode}: {row['why']}; reached {row['fraction']:.3f}, waited {row['waited']:.3g} s"
    last = {f"{mode} on {runtime}": each["last"] for (mode, runtime), each in found.items()}
    if len(last) > 1:
        low, high = min(last, key=lambda name: last[name]), max(last, key=lambda name: last[name])
        seeds = len({row["seed"] for row in rows})
        yield (
            f"final reward, means of {seeds} seeds: {last[low]:.3f} ({low}) to {last[high]:.3f} ({high}), "
            f"{last[high] - last[low]:.3f} apart"
        )


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of all runs."""
    names = ("mode", "runtime", "seed", "step, s", "rollout", "forward", "advantages", "train", "push", "limit, s")
    head = " | ".join([*names, "reached", "bound", "lag", "reward, first", "reward, last"])
    return "\n".join([f"| {head} |", "|---" * (len(names) + 5) + "|", *map(as_row, rows)])


def as_row(row: dict[str, Any]) -> str:
    """One run; work in device-seconds."""
    parts = row["parts"]
    push = parts["push"] + parts["turns"] + parts["snapshot"] + parts["broadcast"] + parts["swap"]
    numbers = (parts["rollout"], parts["reference"] + parts["old"], parts["advantages"], parts["train"], push)
    cells = [row["mode"], row["runtime"], str(row["seed"]), f"{row['step']:.3f}"]
    cells += [f"{number:.3f}" for number in (*numbers, row["limit"], row["fraction"])]
    cells += [row["bound"], *(f"{row[key]:.3f}" for key in ("lag", "first", "last"))]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
