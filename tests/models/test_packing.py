"""Packed rows give what each sample gives alone, and no document sees another."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tandem.base.errors import ContractError
from tandem.columns.ragged import Ragged
from tandem.models.causal_lm import CausalLM
from tandem.models.head.logprobs import token_logprobs
from tandem.models.layouts.packing import Documents, PackedLayout, PackedSamples, pack_samples
from tandem.models.loading import as_causal_lm, new_model

VOCAB = 29
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **LLAMA},
    "qwen2": {"model_type": "qwen2", **LLAMA},
    "qwen3": {"model_type": "qwen3", **LLAMA, "head_dim": 8},
    "gpt2": {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mistral": {"model_type": "mistral", **LLAMA, "sliding_window": 3},
}
MODELS: dict[str, tuple[PreTrainedModel, CausalLM]] = {}


def models(name: str) -> tuple[PreTrainedModel, CausalLM]:
    """A plain model, and its twin under Tandem."""
    if name not in MODELS:
        plain = new_model(SHAPES[name], seed=1)
        twin = copy.deepcopy(plain)
        plain.set_attn_implementation("eager")
        MODELS[name] = (plain, as_causal_lm(twin))
    return MODELS[name]


def packed_logprobs(model: CausalLM, samples: PackedSamples) -> torch.Tensor:
    """(B, L), 0 where nothing is trained."""
    values, _ = model(
        samples.input_ids,
        samples.positions,
        samples.layout,
        lambda hidden, head: token_logprobs(hidden[samples.read], head, samples.targets),
    )
    return samples.padded(values)


def alone(model: PreTrainedModel, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """Log-probs of one sample's response from the plain model, without padding or packing."""
    ids = torch.cat([prompt, response])
    logits = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
    return logits[len(prompt) - 1 : -1].gather(1, response[:, None])[:, 0]


@st.composite
def samples_of_groups(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Prompts (repeated within a group), responses (some empty) and masks (some False)."""
    seed = draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    prompts, responses, masks = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        prompt = torch.randint(VOCAB, (draw(st.integers(1, 9)),), generator=generator)
        for _ in range(draw(st.integers(1, 4))):
            length = draw(st.sampled_from([0, 1, 2, 3, 5, 14]))
            prompts.append(prompt)
            responses.append(torch.randint(VOCAB, (length,), generator=generator))
            masks.append(torch.rand(length, generator=generator) < draw(st.sampled_from([0.5, 1.0])))
    return prompts, responses, masks


def packed(
    prompts: list[torch.Tensor], responses: list[torch.Tensor], masks: list[torch.Tensor], share: bool
) -> PackedSamples:
    return pack_samples(
        Ragged.from_rows(prompts), Ragged.from_rows(responses), Ragged.from_rows(masks), share_prompts=share
    )


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=12)
@given(samples=samples_of_groups(), share=st.booleans())
def test_b36_packed_equals_unpacked(
    name: str, samples: tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]], share: bool
) -> None:
    """Also B34: GPT-2's learned positions are those of the document, wherever it stands in the row."""
    plain, model = models(name)
    prompts, responses, masks = samples
    with torch.no_grad():
        found = packed_logprobs(model, packed(prompts, responses, masks, share))
        for row, prompt, response, mask in zip(found, prompts, responses, masks, strict=True):
            expected = torch.where(mask, alone(plain, prompt, response), 0.0)
            torch.testing.assert_close(row[: len(response)], expected, atol=2e-5, rtol=1e-4)
            assert not row[len(response) :].any()


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_b36_changing_one_document_changes_no_other(name: str) -> None:
    _, model = models(name)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCAB, (4,), generator=generator) for _ in range(3)]
    responses = [torch.randint(VOCAB, (n,), generator=generator) for n in (6, 2, 6)]
    masks = [torch.ones(len(r), dtype=torch.bool) for r in responses]
    with torch.no_grad():
        before = packed_logprobs(model, packed(prompts, responses, masks, True))
        responses[0] = (responses[0] + 1) % VOCAB
        prompts[0] = (prompts[0] + 1) % VOCAB
        after = packed_logprobs(model, packed(prompts, responses, masks, True))
    assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0], after[0])


def test_gradients_with_shared_prompts_equal_those_without() -> None:
    # GPT-2, because Llama's norm computes in float32 even for float64 weights.
    model = as_causal_lm(new_model(SHAPES["gpt2"], seed=2).double())
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(VOCAB, (7,), generator=generator)
    responses = [torch.randint(VOCAB, (n,), generator=generator) for n in (5, 1, 9, 3)]
    masks = [torch.ones(len(r), dtype=torch.bool) for r in responses]
    grads = []
    for share in (True, False):
        samples = packed([prompt] * 4, responses, masks, share)
        assert len(samples.input_ids) == (7 if share else 28) + 4 + 0 + 8 + 2
        model.zero_grad()
        (packed_logprobs(model, samples).square()).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for shared, separate in zip(*grads, strict=True):
        torch.testing.assert_close(shared, separate, atol=1e-12, rtol=1e-10)


def test_equal_lengths_side_by_side_give_what_buckets_give() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 18, 8, generator=generator) for heads in (4, 2, 2))
    blocks = PackedLayout.of_lengths(torch.tensor([6, 6, 6])).attend(0, query, key, value, 0.3, None)
    cut = PackedLayout.of_lengths(torch.tensor([6, 6, 5, 1])).attend(0, query, key, value, 0.3, None)
    torch.testing.assert_close(blocks[:, :17], cut[:, :17])


def test_very_different_lengths_are_not_padded_to_the_longest() -> None:
    layout = PackedLayout.of_lengths(torch.tensor([200, 5, 198, 5]))
    assert sorted(layout._shapes) == [(2, 5), (2, 200)]


def test_an_empty_prompt_is_refused() -> None:
    token, nothing = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ContractError, match=r"sample 1 has an empty prompt.*BOS"):
        packed([token, nothing], [token, token], [token.bool()] * 2, True)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
@settings(max_examples=12)
@given(samples=samples_of_groups(), share=st.booleans(), seed=st.integers(0, 2**20))
def test_where_a_context_begins_anew_nothing_before_is_seen(
    name: str,
    samples: tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]],
    share: bool,
    seed: int,
) -> None:
    """A sample with restarts is what its parts are as samples of their own, token by token."""
    plain, model = models(name)
    prompts, responses, masks = samples
    generator = torch.Generator().manual_seed(seed)
    restarts = [torch.rand(len(response), generator=generator) < 0.25 for response in responses]
    masks = [mask & ~restart for mask, restart in zip(masks, restarts, strict=True)]
    rows = pack_samples(
        *(Ragged.from_rows(column) for column in (prompts, responses, masks)),
        restarts=Ragged.from_rows(restarts),
        share_prompts=share,
    )
    with torch.no_grad():
        found = packed_logprobs(model, rows)
        for row, prompt, response, mask, restart in zip(found, prompts, responses, masks, restarts, strict=True):
            bounds = [0, *restart.nonzero().flatten().tolist(), len(response)]
            parts = [response[start:stop] for start, stop in itertools.pairwise(bounds)]
            expected = [alone(plain, prompt, parts[0])]
            expected += [
                torch.cat([torch.zeros(1), alone(plain, part[:1], part[1:])]) for part in parts[1:] if len(part)
            ]
            torch.testing.assert_close(
                row[: len(response)], torch.where(mask, torch.cat(expected), 0.0), atol=2e-5, rtol=1e-4
            )


@given(samples=samples_of_groups(), seed=st.integers(0, 2**20))
def test_without_shared_prompts_documents_fill_the_row_in_order(
    samples: tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]], seed: int
) -> None:
    """Models that ask for borders are told of each document's length alone."""
    prompts, responses, masks = samples
    generator = torch.Generator().manual_seed(seed)
    restarts = [torch.rand(len(response), generator=generator) < 0.25 for response in responses]
    seen: list[Documents] = []

    def layout(documents: Documents, device: torch.device | str) -> PackedLayout:
        seen.append(documents)
        return PackedLayout(documents, device)

    columns = (Ragged.from_rows(column) for column in (prompts, responses, masks))
    rows = pack_samples(*columns, restarts=Ragged.from_rows(restarts), share_prompts=False, layout=layout)
    (documents,) = seen
    begin = torch.where(documents.prefix_length > 0, documents.prefix_start, documents.start)
    end = documents.start + documents.length
    assert begin.tolist() == [0, *end.tolist()[:-1]] and int(end[-1]) == len(rows.input_ids)
    places = torch.cat([torch.arange(count) for count in documents.totals.tolist()])
    assert torch.equal(rows.positions, places)
