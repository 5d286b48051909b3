"""GRPO steps of TRL, in processor seconds. Runs in an environment of its own (see ../README.md), called by compare.py.

Prints one JSON object as its last line: ``cpu_per_step`` (the first step left out), its ``parts``, mean ``rewards`` and
``lengths`` of each step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from contains import contains
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
    """Counts processor seconds of generation and of passes without gradient; the rest of a step is training."""

    def clear(self) -> None:
        self.seconds = {"rollout": 0.0, "logprobs": 0.0}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        started = time.process_time()
        yield
        self.seconds[part] += time.process_time() - started

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.timed("rollout"):
            return super()._generate_single_turn(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self.timed("logprobs"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)


class Clock(TrainerCallback):  # type: ignore[misc]
    """Begins to count with the second step."""

    started = ended = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.trainer.clear()
            self.started = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended = time.process_time()


def reward(completions: list[Any], answer: list[str], **_: object) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [contains(text, expected) for text, expected in zip(texts, answer, strict=True)]


def settings(args: argparse.Namespace, folder: str) -> GRPOConfig:
    samples = args.prompts * args.samples
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=args.micro_batch or samples,
        gradient_accumulation_steps=samples // (args.micro_batch or samples),
        num_generations=args.samples,
        max_completion_length=args.tokens,
        max_steps=args.steps + 1,
        beta=args.kl,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        adam_beta2=args.beta2,
        scale_rewards=False,
        shuffle_dataset=False,
        bf16=args.dtype == "bfloat16",
        gradient_checkpointing=args.checkpointing,
        use_transformers_continuous_batching=args.continuous,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        seed=args.seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="jsonl of prompt and answer")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--steps", type=int, required=True, help="after the first")
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--kl", type=float, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--beta2", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--micro-batch", type=int, help="samples per forward and backward; default: all")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--continuous", action="store_true", help="transformers' continuous batching")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in args.data.read_text().splitlines()]
    if args.chat:
        rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        clock.trainer = trainer = TimedTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
            reward_funcs=reward,
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
            args=settings(args, folder),
        )
        trainer.clear()
        trainer.train()
    total = (clock.ended - clock.started) / args.steps
    parts = {name: seconds / args.steps for name, seconds in trainer.seconds.items()}
    logs = [row for row in trainer.state.log_history if "reward" in row]
    result = {
        "cpu_per_step": total,
        "parts": {**parts, "train": total - sum(parts.values())},
        "rewards": [row["reward"] for row in logs],
        "lengths": [row["completions/mean_length"] for row in logs],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
