"""Generation: the ``hf`` engine against ``model.generate``, and on a tiny model against a plain loop.

One thread, processor time, both sides in one process and in turn, so that a busy machine slows both alike. Prints JSON.
``--model`` is a Hugging Face folder; without it a random model of SmolLM2-135M's shape stands in, which hardly ever
ends by itself. Run: ``python bench/generate.py --model FOLDER --rounds 3``.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from tandem.base.seeding import derive_seed
from tandem.models.loading import as_causal_lm
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import GroupRequest, Sampling

QUESTIONS = [
    "What is {a} + {b}? Answer with the number.",
    "Name {a} animals that live in the sea.",
    "Tom has {a} apples and buys {b} more. He gives half of them to his sister. How many does he have left?",
    "Write a sentence about the number {b}.",
]


def main() -> None:
    """Run both comparisons and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="Hugging Face folder; default: random weights of SmolLM2-135M's shape")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["large", "tiny"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"threads": 1, "unit": "real tokens per processor-second"}
    if args.only != "tiny":
        report["generate"] = against_generate(args)
    if args.only != "large":
        report["tiny"] = against_plain_loop(args.rounds)
    print(json.dumps(report, indent=2))


def against_generate(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per processor-second with natural ends and with ends forbidden, of both sides, and their ratio."""
    peer, prompts, stops = load(args.model, args.prompts)
    ours = as_causal_lm(AutoModelForCausalLM.from_config(peer.config, dtype=torch.float32))
    ours.model.load_state_dict(peer.state_dict())
    engine = HfEngine(ours)
    result: dict[str, Any] = {"prompt_tokens": [len(p) for p in prompts]}
    for ends in ("natural", "forbidden"):
        sampling = Sampling(n=args.samples, max_tokens=args.tokens, stop_token_ids=stops if ends == "natural" else ())
        result[ends] = compare(
            lambda round, s=sampling: run_engine(engine, prompts, s, round),
            lambda round, e=ends: run_generate(peer, prompts, args.samples, args.tokens, stops, e == "natural", round),
            args.rounds,
        )
    return result


def load(folder: str | None, count: int) -> tuple[PreTrainedModel, list[torch.Tensor], tuple[int, ...]]:
    """A model for ``model.generate``, its prompts (P,) int64 and its stop tokens."""
    if folder is None:
        config = LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        prompts = [torch.randint(3, 49152, (40 + 2 * i,)) for i in range(count)]
        return AutoModelForCausalLM.from_config(config).eval(), prompts, (2,)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [
        [{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)].format(a=2 + i, b=7 + i)}] for i in range(count)
    ]
    prompts = [
        torch.tensor(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        for chat in chats
    ]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, prompts, (tokenizer.eos_token_id,)


def run_engine(engine: HfEngine, prompts: list[torch.Tensor], sampling: Sampling, round: int) -> int:
    """Real tokens made by the engine."""
    requests = [
        GroupRequest(i, prompt, tuple(derive_seed(round, i, j) for j in range(sampling.n)))
        for i, prompt in enumerate(prompts)
    ]
    return sum(len(sample.token_ids) for group in engine.generate(requests, sampling) for sample in group.samples)


def run_generate(
    model: PreTrainedModel,
    prompts: list[torch.Tensor],
    samples: int,
    tokens: int,
    stops: tuple[int, ...],
    natural: bool,
    round: int,
) -> int:
    """Real tokens made by ``model.generate``: up to and with the first stop token of each row."""
    width = max(len(p) for p in prompts)
    ids = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0), value=stops[0]) for p in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(p) for p in prompts]).long()
    torch.manual_seed(round)
    output = model.generate(
        ids.repeat_interleave(samples, 0),
        attention_mask=mask.repeat_interleave(samples, 0),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=tokens,
        # Without an end token nothing is masked at each step: the faster way to forbid ends.
        eos_token_id=list(stops) if natural else None,
        pad_token_id=stops[0],
    )
    answers = output[:, width:]
    if not natural:
        return answers.numel()
    ended = torch.isin(answers, torch.tensor(stops)).long()
    return int((ended.cumsum(1) - ended == 0).sum())


def against_plain_loop(rounds: int) -> dict[str, Any]:
    """64 prompts of 6 tokens × 8 samples × at most 4 tokens on a model of d = 128, against a plain padded loop."""
    config = LlamaConfig(
        vocab_size=36,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    peer = AutoModelForCausalLM.from_config(config).eval()
    ours = as_causal_lm(AutoModelForCausalLM.from_config(config))
    ours.model.load_state_dict(peer.state_dict())
    engine = HfEngine(ours)
    prompts = list(torch.randint(1, 36, (64, 6)))
    sampling = Sampling(n=8, max_tokens=4, stop_token_ids=(0,))
    return compare(
        lambda round: run_engine(engine, prompts, sampling, round),
        lambda round: run_plain_loop(peer, torch.stack(prompts).repeat_interleave(8, 0), 4, round),
        5 * rounds,
    )


@torch.no_grad()
def run_plain_loop(model: PreTrainedModel, prompts: torch.Tensor, tokens: int, round: int) -> int:
    """The least that a hand-written loop does: prefill all rows, draw, append, until every row has ended with 0."""
    torch.manual_seed(round)
    output = model(prompts, use_cache=True)
    done, count = torch.zeros(len(prompts), dtype=torch.bool), 0
    for step in range(tokens):
        logprobs = output.logits[:, -1].log_softmax(-1)
        token = torch.multinomial(logprobs.exp(), 1)[:, 0]
        logprobs.gather(1, token[:, None])
        count += int((~done).sum())
        done |= token == 0
        if bool(done.all()) or step == tokens - 1:
            break
        output = model(token[:, None], past_key_values=output.past_key_values, use_cache=True)
    return count


def compare(ours: Callable[[int], int], peer: Callable[[int], int], rounds: int) -> dict[str, float]:
    """Tokens per processor-second of both, in turn, after one round to warm up; medians."""
    rates: dict[str, list[float]] = {"tandem": [], "peer": []}
    for round in range(rounds + 1):
        for name, run in (("tandem", ours), ("peer", peer)):
            started = time.process_time()
            tokens = run(round)
            if round:
                rates[name].append(tokens / (time.process_time() - started))
    medians = {name: round_to(statistics.median(values)) for name, values in rates.items()}
    ratios = [a / b for a, b in zip(rates["tandem"], rates["peer"], strict=True)]
    return {**medians, "ratio": round_to(statistics.median(ratios))}


def round_to(value: float) -> float:
    """Three significant digits."""
    return float(f"{value:.3g}")


if __name__ == "__main__":
    main()
