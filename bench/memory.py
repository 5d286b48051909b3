"""The plan's estimate of memory against the measured peak of a few steps, for five shapes of runs and SmolLM2.

Each shape runs in a process of its own, with prompts and answers at their longest: peak resident memory after the
imports, less what was resident then. Prints a table. Run: ``python bench/memory.py [SHAPE ...]``.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

Tree = dict[str, Any]
STEPS = 2
SCORER = "def anything(response: str) -> float:\n    return len(set(response)) % 7 / 7\n"
"""Grades that differ, so that every step trains."""

LLAMA = {"model_type": "llama", "bos_token_id": None, "tie_word_embeddings": False, "max_position_embeddings": 2048}


def shape(vocabulary: int, hidden: int, layers: int, *, heads: int = 4, kv: int = 4) -> Tree:
    """The config of a Llama with so many tokens."""
    return {
        **LLAMA,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
    }


def run(prompt: int, answer: int, prompts: int, n: int, **more: Any) -> Tree:
    """What a run of such sizes changes in the config; ``more`` by dotted key, with ``__`` for a dot."""
    words = {
        "data.max_prompt_length": prompt,
        "data.max_response_length": answer,
        "data.train_batch_size": prompts,
        "actor_rollout_ref.rollout.n": n,
    }
    return words | {key.replace("__", "."): value for key, value in more.items()}


SHAPES: dict[str, tuple[Tree, Tree]] = {
    "wide": (shape(1000, 640, 6), run(32, 32, 8, 4)),
    "long answers": (shape(1000, 256, 4), run(16, 240, 4, 8)),
    "large vocabulary": (shape(20000, 256, 2), run(32, 32, 8, 4)),
    "critic": (shape(1000, 384, 5), run(32, 64, 8, 4, critic__enable=True, algorithm__adv_estimator="gae")),
    "bfloat16, checkpointing, reference": (
        shape(4000, 512, 6, heads=8, kv=2),
        run(
            *(32, 96, 8, 4),
            actor_rollout_ref__model__dtype="bfloat16",
            actor_rollout_ref__model__gradient_checkpointing=True,
            algorithm__kl__in="loss",
        ),
    ),
}


def write(folder: Path, model: Tree | None, words: Tree, path: str | None = None) -> Path:
    """A folder with the model (or the one in ``path``), prompts of the longest size, and the config of a run."""
    from tandem.models.loading import new_model, save_pretrained_atomic
    from tandem.models.tokenizer import character_tokenizer, load_tokenizer

    longest = words["data.max_prompt_length"]
    if path is None:
        assert model is not None
        alphabet = [chr(0x4E00 + i) for i in range(model["vocab_size"] - 3)]
        tokenizer = character_tokenizer(alphabet)
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        save_pretrained_atomic(new_model({**model, **ends}, seed=0), tokenizer, folder / "model")
        texts = ["".join(alphabet[(i + j) % len(alphabet)] for j in range(longest)) for i in range(64)]
    else:
        tokenizer = load_tokenizer(path)
        word = next(w for w in (" one", " two") if len(tokenizer(w, add_special_tokens=False)["input_ids"]) == 1)
        texts = [word * longest] * 64
    (folder / "anything.py").write_text(SCORER)
    rows = [{"prompt": text, "answer": "x", "uid": str(i)} for i, text in enumerate(texts)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    fixed = {
        "actor_rollout_ref.model.path": path or str(folder / "model"),
        "actor_rollout_ref.rollout.ignore_eos": True,
        "reward_manager.type": "anything",
        "reward_manager.file": str(folder / "anything.py"),
        "data.train_files": [str(folder / "train.jsonl")],
        "data.uid_key": "uid",
        "trainer.total_steps": STEPS,
        "trainer.logger": [],
        "trainer.output_dir": str(folder / "run"),
        "runtime.threads": True,
        "runtime.torch_threads": 1,
        "algorithm.adv_estimator": "reinforce_plus_plus",
    }
    tree: Tree = {}
    for key, value in (fixed | words).items():
        node = tree
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    (folder / "run.yaml").write_text(yaml.safe_dump(tree), "utf-8")
    return folder / "run.yaml"


def resident(field: str) -> int:
    """Bytes that the system counts for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


def measure(config: Path) -> None:
    """In a child: print estimate and measured peak as JSON."""
    from tandem.config.load import load_words
    from tandem.config.schema import Config
    from tandem.control.entry import run_train
    from tandem.plan.plan import compile_plan

    loaded = load_words([str(config)], Config)
    plan = compile_plan(loaded)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    run_train(loaded, plan)
    parts = {name: part.size for group in plan.memory for name, part in group.held.items()}
    found = {"estimate": sum(group.total for group in plan.memory), "parts": parts}
    print("RESULT", json.dumps(found | {"measured": resident("VmHWM") - before}))


def child(config: Path) -> Tree:
    """What a process of its own measures."""
    done = subprocess.run([sys.executable, __file__, "--measure", str(config)], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{config}: {done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    result: Tree = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def smollm() -> str | None:
    """The folder of SmolLM2-135M, if it was fetched before."""
    from tandem.models.folder.fetch import DEFAULT_ROOT

    folder = DEFAULT_ROOT / "smollm2-135m"
    return str(folder) if (folder / "config.json").is_file() else None


def main(names: list[str]) -> None:
    """Measure the shapes of these ``names``, or all."""
    print(f"{platform.processor() or platform.machine()}, one thread, {STEPS} steps\n")
    print("| shape | estimate (MB) | measured (MB) | estimate / measured |\n| --- | --- | --- | --- |")
    runs: dict[str, tuple[Tree | None, Tree, str | None]] = {name: (*pair, None) for name, pair in SHAPES.items()}
    large = smollm()
    if large is not None:
        runs["SmolLM2-135M, 8 samples of 32 tokens"] = (None, run(16, 16, 2, 4), large)
    for name, (model, words, path) in runs.items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = child(write(Path(folder), model, words, path))
        ratio = found["estimate"] / found["measured"]
        print(f"| {name} | {found['estimate'] / 1e6:.0f} | {found['measured'] / 1e6:.0f} | {ratio:.2f} |", flush=True)
        if "--parts" in sys.argv:
            print({key: round((size or 0) / 1e6, 1) for key, size in found["parts"].items()})
    if large is None:
        print("\nSmolLM2-135M is left out: it is not here (tandem models fetch smollm2-135m).")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(Path(sys.argv[2]))
    else:
        main([name for name in sys.argv[1:] if not name.startswith("--")])
