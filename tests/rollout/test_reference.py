"""The engine against a reference that runs the whole sequence again for each token, in plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tandem.models.loading import as_causal_lm
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import GroupOutput, GroupRequest, Sampling

V = 40
_SHAPE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 80,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=8),
    "mistral, window 6": MistralConfig(**_SHAPE, sliding_window=6),
    "gpt2": GPT2Config(vocab_size=V, n_embd=24, n_layer=2, n_head=4, n_positions=80),
}
MASK = 2**64 - 1


def build(name: str) -> PreTrainedModel:
    """A random model whose distributions are far from uniform, in float64 so that no draw is near a rounding error."""
    torch.manual_seed(7)
    model: PreTrainedModel = (
        AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").double().eval()
    )
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.4
    return model


MODELS = {name: build(name) for name in CONFIGS}
LMS = {name: as_causal_lm(build(name)) for name in CONFIGS}


def uniform(seed: int, counter: int) -> float:
    """SplitMix64 in Python integers."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    return ((mix((mix(seed) + (counter + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11) + 0.5) / 2**53


def distribution(logits: list[float], sampling: Sampling) -> list[float]:
    scaled = [x / sampling.temperature for x in logits]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if mass >= sampling.top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    return [weights[i] / mass if i in set(kept) else 0.0 for i in range(len(weights))]


@torch.no_grad()
def reference(
    model: PreTrainedModel, prompt: list[int], seed: int, sampling: Sampling
) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < sampling.max_tokens and (not tokens or tokens[-1] not in sampling.stop_token_ids):
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1].tolist()
        if sampling.greedy:
            tokens.append(max(range(V), key=lambda i: logits[i]))
            logprobs.append(logits[tokens[-1]] - math.log(sum(math.exp(x) for x in logits)))
            continue
        probs = distribution(logits, sampling)
        point = uniform(seed, len(tokens))
        token = next(i for i, reached in enumerate(accumulate(probs)) if reached > point)
        tokens.append(token)
        logprobs.append(math.log(probs[token]))
    return tokens, logprobs


def check(model: PreTrainedModel, outputs: list[GroupOutput], requests: list[GroupRequest], sampling: Sampling) -> None:
    assert sorted(o.request.key for o in outputs) == sorted(r.key for r in requests)
    for output in outputs:
        assert len(output.samples) == sampling.n
        for seed, sample in zip(output.request.seeds, output.samples, strict=True):
            asked = replace(sampling, max_tokens=output.request.limit(sampling))
            tokens, logprobs = reference(model, output.request.prompt_ids.tolist(), seed, asked)
            assert sample.token_ids.tolist() == tokens
            assert sample.logprobs.tolist() == pytest.approx(logprobs, abs=2e-5)
            assert sample.finish_reason == ("stop" if tokens[-1] in sampling.stop_token_ids else "length")
            assert sample.versions.tolist() == [3] * len(tokens)
            assert (sample.token_ids.dtype, sample.logprobs.dtype) == (torch.int64, torch.float32)
            assert sample.versions.dtype == torch.int32


@settings(max_examples=12, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", CONFIGS)
def test_any_composition_of_the_batch_equals_the_reference(name: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 3))
    sampling = Sampling(
        n=n,
        max_tokens=data.draw(st.integers(1, 30)),
        temperature=data.draw(st.sampled_from([1.0, 0.6, 1.5])),
        stop_token_ids=tuple(data.draw(st.lists(st.integers(0, V - 1), max_size=4))),
        top_p=data.draw(st.sampled_from([1.0, 0.7])),
        top_k=data.draw(st.sampled_from([-1, 5])),
        greedy=data.draw(st.booleans()),
    )
    lengths = data.draw(st.lists(st.integers(3, 40), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    requests = [
        GroupRequest(
            key,
            torch.randint(V, (length,), generator=generator),
            tuple(range(100 * key, 100 * key + n)),
            max_tokens=data.draw(st.none() | st.integers(1, 40)),
        )
        for key, length in enumerate(lengths)
    ]
    engine = HfEngine(
        LMS[name],
        version=3,
        shares_weights=True,
        exact=data.draw(st.booleans()),
        max_num_seqs=data.draw(st.integers(n, 3 * n)),
        max_num_batched_tokens=data.draw(st.integers(1, 100)),
    )
    check(MODELS[name], list(engine.generate(requests, sampling)), requests, sampling)
    check(MODELS[name], list(engine.generate(requests[:2], sampling)), requests[:2], sampling)
