"""A GRPO step of Tandem against one of TRL: same weights, prompts, reward and settings, one thread, processor seconds.

Both run in turn, each in a process and with an interpreter of its own. TRL runs in every variant of ``--trl``, and its
fastest is what counts. Writes ``TASK_PROMPTS.json`` into ``--out`` after every round, prints a table. For example::

    python bench/peers/compare.py smollm2 --model models/smollm2-135m --trl-python .venv-trl/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

PEERS = Path(__file__).resolve().parent
ROOT = PEERS.parents[1]


@dataclass(frozen=True)
class Task:
    """What both sides are given. ``digits`` is the largest summand; ``beta2`` that of AdamW."""

    question: str
    largest: int
    chat: bool
    prompts: int
    tokens: int
    kl: float
    lr: float
    beta2: float

    def rows(self, count: int) -> list[dict[str, str]]:
        """``count`` sums as prompt and answer, the same ones for everybody."""
        rng = random.Random(0)
        pairs = [(rng.randint(0, self.largest), rng.randint(0, self.largest)) for _ in range(count)]
        return [{"prompt": self.question.format(x=x, y=y), "answer": str(x + y)} for x, y in pairs]


TASKS = {
    "tiny": Task("{x:2d}+{y:2d}=", 99, False, prompts=64, tokens=4, kl=0.0, lr=1e-4, beta2=0.95),
    "smollm2": Task(
        "What is {x} + {y}? Say how you find it, then give the number.",
        9,
        True,
        prompts=8,
        tokens=64,
        kl=0.04,
        lr=1e-6,
        beta2=0.999,
    ),
}
SAMPLES = 8
VARIANTS = {
    "float32": [],
    "bfloat16": ["--dtype", "bfloat16"],
    "micro-batches": ["--micro-batch", "16"],
    "continuous": ["--continuous"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--trl-python", type=Path, required=True, help="interpreter of an environment with TRL")
    parser.add_argument("--trl", choices=VARIANTS, nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a run, after one to warm up")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/peers"))
    args = parser.parse_args()
    task, out, model = TASKS[args.task], args.out.resolve(), str(args.model.resolve())
    prompts = args.prompts or task.prompts
    out.mkdir(parents=True, exist_ok=True)
    data = out / f"{args.task}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in task.rows(prompts * (args.steps + 1))))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ["tandem", *args.trl]}
    for seed in range(args.rounds):
        words = tandem_words(task, prompts, args.steps, model, data, seed, out / "tandem")
        runs["tandem"].append(python(sys.executable, ROOT / "bench" / "measured_run.py", *words))
        shared = trl_words(task, prompts, args.steps, model, data, seed)
        for name in args.trl:
            runs[name].append(python(args.trl_python, PEERS / "trl_step.py", *shared, *VARIANTS[name]))
            each = seconds(runs["tandem"][-1:]) / seconds(runs[name][-1:])
            print(f"round {seed}: tandem / TRL {name} = {each:.3f}", flush=True)
        best = min(args.trl, key=lambda name: seconds(runs[name]))
        ratio = seconds(runs["tandem"]) / seconds(runs[best])
        result = {"task": args.task, "prompts": prompts, "ratio": ratio, "best": best, "runs": runs}
        (out / f"{args.task}_{prompts}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(as_table(runs))
    print(f"ratio to TRL's best ({best}): {ratio:.3f}")


def tandem_words(
    task: Task, prompts: int, steps: int, model: str, data: Path, seed: int, out: Path
) -> Sequence[object]:
    """A config as command-line words; one step more than is measured."""
    kl = [f"algorithm.kl={{in: loss, type: k3, coef: {task.kl}}}"] if task.kl else []
    return [
        "--skip=1",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.actor.optim={{lr: {task.lr}, betas: [0.9, {task.beta2}]}}",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        "algorithm.adv_estimator={type: grpo, norm_adv_by_std: false}",
        *kl,
        f"reward_manager={{type: contains, file: {PEERS / 'contains.py'}}}",
        f"data.train_files=[{data}]",
        f"data.chat={str(task.chat).lower()}",
        "data.shuffle=false",
        f"data.train_batch_size={prompts}",
        "data.max_prompt_length=128",
        f"data.max_response_length={task.tokens}",
        f"trainer.total_steps={steps + 1}",
        f"trainer.seed={seed}",
        f"trainer.output_dir={out}",
        "trainer.logger=[]",
        "runtime.torch_threads=1",
    ]


def trl_words(task: Task, prompts: int, steps: int, model: str, data: Path, seed: int) -> Sequence[object]:
    """The same as arguments of trl_step.py."""
    values = {
        "model": model,
        "data": data,
        "steps": steps,
        "prompts": prompts,
        "samples": SAMPLES,
        "tokens": task.tokens,
        "kl": task.kl,
        "lr": task.lr,
        "beta2": task.beta2,
        "seed": seed,
    }
    return [f"--{name}={value}" for name, value in values.items()] + (["--chat"] if task.chat else [])


def python(interpreter: str | Path, *words: object) -> dict[str, Any]:
    """The JSON object that a Python program with one thread and no network prints last."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [str(interpreter), *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def seconds(runs: Sequence[dict[str, Any]]) -> float:
    """Processor seconds per step, the median over runs."""
    return float(median(run["cpu_per_step"] for run in runs))


def as_table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A Markdown table of medians and of what each step is made of."""
    lines = ["| | processor s per step | parts | mean length |", "|---|---|---|---|"]
    for name, each in runs.items():
        parts = {part: fmean(run["parts"][part] for run in each) for part in each[0]["parts"]}
        times = ", ".join(f"{part} {value:.2f}" for part, value in parts.items() if value >= 0.005)
        length = fmean(fmean(run["lengths"][1:]) for run in each)
        lines.append(
            f"| {name if name == 'tandem' else 'TRL ' + name} | {seconds(each):.3f} | {times} | {length:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
