"""A tiny model of SmolLM2's family that the engines' kernels take, and what it gives on plain transformers."""

from __future__ import annotations

from functools import cache

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from tandem.models.token_ids import TokenIds
from tandem.rollout.protocol import GroupOutput, GroupRequest, SampleOutput, Sampling

V = 96
KNOWN = TokenIds(V - 6, (11, 40))
"""Of the ids that the model embeds, those that there are tokens for."""


@cache
def model(seed: int) -> PreTrainedModel:
    """The same one each time, for forwards as plain transformers makes them."""
    return new_model(seed)


def new_model(seed: int) -> PreTrainedModel:
    """Tied embeddings; weights large enough that distributions are far from uniform."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return made.eval()


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    """As they are sent: the tied one under both names."""
    return [(name, p.detach().clone()) for name, p in model(seed).named_parameters(remove_duplicate=False)]


def requests(count: int, n: int, *, shortest: int = 4, longest: int = 70, seed: int = 0) -> list[GroupRequest]:
    """Prompts below and above the size of a block of keys and values; seeds differ everywhere."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(shortest, longest, count).long().tolist()
    return [
        GroupRequest(key, torch.randint(V, (length,), generator=generator), tuple(100 * key + i for i in range(n)))
        for key, length in enumerate(lengths)
    ]


def tokens(outputs: list[GroupOutput]) -> dict[int | str, list[list[int]]]:
    return {o.request.key: [s.token_ids.tolist() for s in o.samples] for o in outputs}


def difference(outputs: list[GroupOutput], sampling: Sampling, *, old_kv: bool = False) -> float:
    """The largest between the engine's log-probs and those of the distribution that it says it drew from.

    Weights of version v are those of ``model(v)``. ``old_kv``: keys and values of a token are those of the weights that
    first saw it; else all are of the weights that drew the token.
    """
    found = [0.0]
    for output in outputs:
        for place, sample in enumerate(output.samples):
            greedy = sampling.greedy or place == sampling.n
            logits = (_with_old_kv if old_kv else _recomputed)(output.request.prompt_ids, sample)
            expected = _drawn_from(logits, sampling, greedy).gather(1, sample.token_ids[:, None])[:, 0]
            found.append(float((expected - sample.logprobs).abs().max()))
    return max(found)


@torch.no_grad()
def _recomputed(prompt: torch.Tensor, sample: SampleOutput) -> torch.Tensor:
    ids, first = torch.cat([prompt, sample.token_ids])[None, :-1], len(prompt) - 1
    by_version = {v: model(v)(ids, use_cache=False).logits[0, first:] for v in set(sample.versions.tolist())}
    return torch.stack([by_version[v][place] for place, v in enumerate(sample.versions.tolist())])


@torch.no_grad()
def _with_old_kv(prompt: torch.Tensor, sample: SampleOutput) -> torch.Tensor:
    cache, fresh, rows = DynamicCache(), prompt, []
    for place, version in enumerate(sample.versions.tolist()):
        result = model(version)(fresh[None], past_key_values=cache, use_cache=True)
        rows.append(result.logits[0, -1])
        fresh = sample.token_ids[place : place + 1]
    return torch.stack(rows)


def _drawn_from(logits: torch.Tensor, sampling: Sampling, greedy: bool) -> torch.Tensor:
    """Log-probs (T, V) of what tokens are drawn from; greedy ones have the model's own. Both among ``KNOWN`` ones."""
    logits = logits.clone()
    logits[:, [*KNOWN.holes, *range(KNOWN.count, V)]] = -torch.inf
    if greedy:
        return logits.log_softmax(-1)
    if sampling.logprobs_of == "full":
        return (logits / sampling.temperature).log_softmax(-1)
    values, order = (logits / sampling.temperature).softmax(-1).sort(-1, descending=True)
    kept = torch.ones_like(values, dtype=torch.bool)
    if sampling.top_k > 0:
        kept[:, sampling.top_k :] = False
    values = torch.where(kept, values, 0.0)
    before = values.cumsum(-1) - values
    values = torch.where(before < sampling.top_p * values.sum(-1, keepdim=True), values, 0.0)
    return torch.zeros_like(values).scatter(-1, order, values / values.sum(-1, keepdim=True)).log()
