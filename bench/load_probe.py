"""What the proof at load costs: milliseconds for tiny models, and its share of loading 135 M parameters.

One thread, processor time. The large model has SmolLM2-135M's shape and random weights, in float32 on disk. Prints a
table.
Run: ``python -m bench.load_probe``.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from tandem.models.causal_lm import CausalLM
from tandem.models.loading import as_causal_lm, from_pretrained, new_model
from tandem.models.probe import prove
from tools.families import build

SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
ROUNDS = 5


def seconds(work: Callable[[], object]) -> float:
    """Of the processor, for one call: what else runs on the machine makes no call cost more."""
    began = time.process_time()
    work()
    return time.process_time() - began


def proof(model: CausalLM) -> float:
    """Seconds to prove ``model`` for training and for generation."""
    model.proved = frozenset()
    return seconds(lambda: (prove(model, "training"), prove(model, "generation")))


def forwards(model: CausalLM) -> int:
    """How often the decoder runs in a proof."""
    counted: list[None] = []
    hook = model.decoder.register_forward_hook(lambda *args: counted.append(None))
    proof(model)
    hook.remove()
    return len(counted)


def large(folder: Path) -> tuple[float, float]:
    """Seconds to read the large model and measure its head, and to prove it."""
    began = time.process_time()
    model = as_causal_lm(from_pretrained(folder, False))
    loaded = time.process_time() - began
    return loaded, proof(model)


def main() -> None:
    """Measure and print."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(f"{platform.machine()}, one thread, processor time, median of {ROUNDS}\n")
    print("| model | forwards | proof (ms) |\n| --- | --- | --- |")
    for family in ("llama", "mixtral", "gemma2", "jamba"):
        model = as_causal_lm(build(family))
        count, proved = forwards(model), statistics.median(proof(model) for _ in range(ROUNDS))
        print(f"| tiny {family} ({model.route}) | {count} | {1e3 * proved:.0f} |")
    with tempfile.TemporaryDirectory() as folder:
        new_model(SMOLLM2, seed=0).save_pretrained(folder)
        times = [large(Path(folder)) for _ in range(ROUNDS)]
    loaded, proved = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"| 135 M parameters | as llama | {1e3 * proved:.0f} |")
    print(f"\n135 M: {loaded:.2f} s to load, {proved / (loaded + proved):.0%} of both is the proof")


if __name__ == "__main__":
    main()
