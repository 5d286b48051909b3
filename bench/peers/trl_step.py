"""One GRPO step of TRL, in processor seconds: the peer of bench/peers/tandem_step.py, run in an environment of its own.

See bench/README.md for the environment. Prints one JSON line: processor seconds per step (the first left out), their
parts where TRL logs them, and the mean reward.
"""

import argparse
import json
import random
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def sums(count):
    """Prompts of the quickstart and their answers."""
    rng = random.Random(0)
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(count)]
    return [{"prompt": f"{x:2d}+{y:2d}=", "answer": str(x + y)} for x, y in pairs]


def chat_sums(count):
    """One-digit sums asked by chat template."""
    rng = random.Random(0)
    pairs = [(rng.randrange(10), rng.randrange(10)) for _ in range(count)]
    question = "What is {} + {}? Answer with the number, then explain how you found it."
    return [
        {"prompt": [{"role": "user", "content": question.format(x, y)}], "answer": str(x + y)} for x, y in pairs
    ]


def contains(completions, answer, **_):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(a in t) for t, a in zip(texts, answer)]


class Clock(TrainerCallback):
    def __init__(self):
        self.marks = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.marks.append(time.process_time())

    def on_step_end(self, args, state, control, **kwargs):
        self.end = time.process_time()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", choices=["tiny", "smollm2"], required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = (sums if args.task == "tiny" else chat_sums)(args.prompts * (args.steps + 1))
    bf16 = args.dtype == "bfloat16"
    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
        reward_funcs=contains,
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
        args=GRPOConfig(
            output_dir="/tmp/trl-step",
            per_device_train_batch_size=args.prompts * args.samples,
            num_generations=args.samples,
            max_completion_length=args.tokens,
            max_steps=args.steps + 1,
            beta=args.beta,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            adam_beta2=0.95 if args.task == "tiny" else 0.999,
            scale_rewards=False,
            bf16=bf16,
            gradient_checkpointing=args.checkpointing,
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            seed=0,
        ),
    )
    trainer.train()
    logs = [row for row in trainer.state.log_history if "reward" in row]
    seconds = (clock.end - clock.marks[1]) / args.steps
    length = sum(row["completions/mean_length"] for row in logs[1:]) / args.steps
    print(json.dumps({"cpu_per_step": seconds, "mean_length": length, "rewards": [row["reward"] for row in logs]}))


if __name__ == "__main__":
    main()
