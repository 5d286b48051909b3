"""Small random models for the engine's tests."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

from tandem.models.causal_lm import CausalLM
from tandem.models.loading import as_causal_lm
from tandem.rollout.protocol import GroupOutput, GroupRequest

V = 40


def llama(seed: int = 0, *, tied: bool = False) -> PreTrainedModel:
    """Weights large enough that distributions are far from uniform."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        tie_word_embeddings=tied,
    )
    return _random(AutoModelForCausalLM.from_config(config), seed)


def gpt2(seed: int = 0) -> PreTrainedModel:
    """Learned absolute positions."""
    return _random(
        AutoModelForCausalLM.from_config(GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=96)), seed
    )


def lm(seed: int = 0) -> CausalLM:
    return as_causal_lm(llama(seed))


def requests(count: int, n: int = 2, *, shortest: int = 3, longest: int = 20, seed: int = 0) -> list[GroupRequest]:
    """Random prompts of mixed lengths; seeds differ everywhere."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [
        GroupRequest(
            key, torch.randint(V, (length,), generator=generator), tuple(1000 * seed + 10 * key + i for i in range(n))
        )
        for key, length in enumerate(lengths)
    ]


def tokens(outputs: list[GroupOutput]) -> dict[int | str, list[list[int]]]:
    return {o.request.key: [s.token_ids.tolist() for s in o.samples] for o in outputs}


def bits(outputs: list[GroupOutput]) -> dict[int | str, list[tuple[bytes, bytes]]]:
    """Tokens and log-probs, bit by bit."""
    return {
        o.request.key: [(s.token_ids.numpy().tobytes(), s.logprobs.numpy().tobytes()) for s in o.samples]
        for o in outputs
    }


def _random(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    model.eval()
    return model
