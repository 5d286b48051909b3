"""Generation: the engines ``hf``, ``vllm`` and ``sglang``, each in a process of its own as a run has it.

Real tokens per processor-second of the engine's process with 1, 16 and 64 samples in flight, ends forbidden, the same
prompts, in turn. Prints JSON. Run: ``python bench/engines.py --model FOLDER --vllm .engines/vllm/bin/python``; the same
with ``--sglang``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import psutil
import torch
from transformers import AutoTokenizer

from tandem.base.seeding import derive_seed
from tandem.models.loading import load_model
from tandem.rollout.process import ProcessEngine
from tandem.rollout.protocol import GroupRequest, Sampling
from tandem.rollout.spec import EngineSpec


def main() -> None:
    """Start the engines, compare, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--vllm", help="interpreter of the environment that has vLLM")
    parser.add_argument("--sglang", help="interpreter of the environment that has SGLang")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each sample")
    parser.add_argument("--flights", type=int, nargs="+", default=[1, 16, 64], help="samples in flight")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps(compare(args), indent=2))


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Medians by engine and samples in flight, and seconds of a push and of the question that follows it."""
    prompts = encoded(args.model)
    spec = EngineSpec(
        model=args.model, dtype=args.dtype, threads=1, version=-1, max_num_seqs=max(args.flights), context=512
    )
    others = {"vllm": args.vllm, "sglang": args.sglang}
    specs = {"hf": spec}
    specs |= {name: replace(spec, engine=name, python=python) for name, python in others.items() if python}
    engines: dict[str, ProcessEngine] = {}
    report: dict[str, Any] = {"dtype": args.dtype, "unit": "tokens per processor-second"}
    weights = list(load_model(args.model).named_parameters(remove_duplicate=False))
    try:
        for name, spec in specs.items():
            started = time.monotonic()
            engine = engines[name] = ProcessEngine(name, spec)
            engine.wait_until_ready()
            report[f"{name}_start_s"] = rounded(time.monotonic() - started)
            engine.load(((n, p.detach()) for n, p in weights), 0)
            report[f"{name}_load_s"] = rounded(engine.applied_s)
        for flight in args.flights:
            rates: dict[str, list[float]] = {name: [] for name in engines}
            for number in range(args.rounds + 1):
                for name, engine in engines.items():
                    rate = tokens_per_second(engine, prompts, flight, args.tokens, number)
                    if number:
                        rates[name].append(rate)
            report[str(flight)] = {name: rounded(statistics.median(found)) for name, found in rates.items()}
            print(f"{flight} in flight: {report[str(flight)]}", file=sys.stderr, flush=True)
        report["probe_s"] = {name: rounded(probed(engine, prompts)) for name, engine in engines.items()}
    finally:
        for engine in engines.values():
            engine.close()
    return report


def encoded(folder: str) -> list[torch.Tensor]:
    """Eight questions by the model's chat template, (P,) int64 each."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": f"What is {i} + {7 + i}? Explain each step."}] for i in range(8)]
    return [
        torch.tensor(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        for chat in chats
    ]


def tokens_per_second(
    engine: ProcessEngine, prompts: list[torch.Tensor], flight: int, tokens: int, number: int
) -> float:
    """Of so many samples at once, in groups of at most eight."""
    groups = -(-flight // 8)
    n = flight // groups
    requests = [
        GroupRequest(i, prompts[i % len(prompts)], tuple(derive_seed(number, i, j) for j in range(n)))
        for i in range(groups)
    ]
    began = processor_seconds(engine.pid)
    outputs = list(engine.generate(requests, Sampling(n=n, max_tokens=tokens)))
    spent = processor_seconds(engine.pid) - began
    return sum(len(sample.token_ids) for output in outputs for sample in output.samples) / spent


def probed(engine: ProcessEngine, prompts: list[torch.Tensor]) -> float:
    """Wall seconds of one question after each prompt, as at a push."""
    began = time.perf_counter()
    list(engine.generate([GroupRequest(i, p, (i,)) for i, p in enumerate(prompts)], Sampling(1, 1, greedy=True)))
    return time.perf_counter() - began


def processor_seconds(pid: int) -> float:
    """Of all threads of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def rounded(value: float) -> float:
    """Three significant digits."""
    return float(f"{value:.3g}")


if __name__ == "__main__":
    main()
