"""Rows that pad an embedding are no tokens: never sampled, and log-probs are of the distribution over tokens alone."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from tandem.base.errors import DataError
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.config.model import OptimConfig
from tandem.models.causal_lm import CausalLM
from tandem.models.head.logprobs import sum_pi_squared, token_logprobs, top_logprobs
from tandem.models.head.projection import Head, Transform
from tandem.models.layouts.packing import pack_samples
from tandem.models.loading import as_causal_lm, new_model
from tandem.models.probe import prove
from tandem.models.token_ids import TokenIds
from tandem.models.tokenizer import character_tokenizer
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import GroupRequest, Sampling
from tandem.train.engine import FsdpEngine
from tools.families import build

TOKENS = TokenIds(60, holes=(7, 31))
KEPT = torch.tensor([i for i in range(60) if i not in TOKENS.holes])


def pair(family: str, dtype: str = "float32") -> tuple[nn.Module, CausalLM]:
    """A plain model that likes ids best which are no tokens, and its twin with 58 of 96 of them."""
    plain = build(family)
    with torch.no_grad():
        embedding = plain.get_output_embeddings()
        embedding.weight[60:] *= 8
        embedding.weight[list(TOKENS.holes)] *= 8
    return plain, as_causal_lm(copy.deepcopy(plain), dtype=dtype, tokens=TOKENS)  # type: ignore[arg-type]


def restricted(plain: nn.Module, prompt: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Log-probs of ``answer`` among tokens only."""
    logits = plain(input_ids=torch.cat([prompt, answer])[None], use_cache=False).logits[0]
    left_out = torch.ones(logits.shape[1], dtype=torch.bool)
    left_out[KEPT] = False
    every = logits.masked_fill(left_out, float("-inf")).log_softmax(-1)
    found: torch.Tensor = every[len(prompt) - 1 : -1].gather(1, answer[:, None])[:, 0]
    return found


def batch_of(prompts: list[torch.Tensor], answers: list[torch.Tensor]) -> DataProto:
    responses = Ragged.from_rows(answers)
    mask = responses.like(torch.ones(len(responses.values), dtype=torch.bool))
    return DataProto({"prompts": Ragged.from_rows(prompts), "responses": responses, "response_mask": mask})


def trainer(model: CausalLM) -> FsdpEngine:
    return FsdpEngine(model, optim=OptimConfig(), total_updates=1, max_tokens_per_micro_batch=64, temperature=1.0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "granite", "gemma2", "cohere", "codegen", "jamba"])
def test_engine_and_trainer_know_tokens_only_and_agree(family: str) -> None:
    plain, model = pair(family)
    engine = HfEngine(model)
    prompts = [torch.tensor([3, 4, 5]), torch.tensor([9, 8, 10, 11])]
    requests = [GroupRequest(key, prompt, (2 * key, 2 * key + 1)) for key, prompt in enumerate(prompts)]
    for sampling in (Sampling(n=2, max_tokens=12), Sampling(n=2, max_tokens=12, greedy=True)):
        for output in engine.generate(requests, sampling):
            prompt = output.request.prompt_ids
            rows = [sample.token_ids for sample in output.samples]
            assert bool(torch.isin(torch.cat(rows), KEPT).all())
            scored = trainer(model).forward(batch_of([prompt] * 2, rows), ["logprobs", "entropies"])
            assert bool(scored["entropies"].values.isfinite().all())
            for row, (sample, found) in enumerate(zip(output.samples, scored["logprobs"], strict=True)):
                with torch.no_grad():
                    expected = restricted(plain, prompt, rows[row])
                torch.testing.assert_close(sample.logprobs, expected, atol=2e-4, rtol=1e-3)
                torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


def test_in_bfloat16_tokens_alone_are_sampled_too() -> None:
    _, model = pair("llama", "bfloat16")
    (output,) = HfEngine(model).generate([GroupRequest(0, torch.tensor([3, 4]), (1, 2))], Sampling(n=2, max_tokens=30))
    for sample in output.samples:
        assert bool(torch.isin(sample.token_ids, KEPT).all())
        assert bool(sample.logprobs.isfinite().all())


def test_gradients_are_those_of_the_restricted_distribution_and_leave_other_rows_alone() -> None:
    plain, model = pair("gemma2")
    prompt, answer = torch.tensor([3, 4, 5]), torch.tensor([6, 8, 50])
    restricted(plain, prompt, answer).sum().backward()
    prove(model, "training")

    rows = [Ragged.from_rows([ids]) for ids in (prompt, answer)]
    samples = pack_samples(*rows, Ragged.from_rows([torch.ones(3, dtype=torch.bool)]), layout=model.layout)
    values, _ = model(
        samples.input_ids,
        samples.positions,
        samples.layout,
        lambda hidden, head: token_logprobs(hidden[samples.read], head, samples.targets),
    )
    values.sum().backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in model.model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=1e-3, rtol=1e-3, msg=name)


@pytest.mark.parametrize("transform", [Transform(), Transform(scale=0.5, softcap=2.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("chunk", [1, 10_000])
def test_every_chunking_gives_values_and_gradients_of_tokens_alone(transform: Transform, chunk: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(12, 5, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    hidden, targets = torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, 2, 4, 8, 6, 1])
    kept = torch.tensor([0, 1, 2, 4, 6, 8])
    found = []
    for head in (
        Head(weight.clone().requires_grad_(), bias.clone().requires_grad_(), transform, 9, torch.tensor([3, 5, 7])),
        Head(weight[kept].requires_grad_(), bias[kept].requires_grad_(), transform),
    ):
        states = hidden.clone().requires_grad_()
        places = targets if head.count else torch.searchsorted(kept, targets)
        logprobs, entropies = token_logprobs(
            states, head, places, temperature=0.7, entropy_grad=True, chunk_elements=chunk
        )
        assert entropies is not None and head.bias is not None
        (logprobs.sum() + 2 * entropies.square().sum()).backward()
        squares = sum_pi_squared(states, head, temperature=0.7, chunk_elements=chunk)
        best, ids = top_logprobs(states, head, 3, below=head.size, temperature=0.7, chunk_elements=chunk)
        grads = (head.weight.grad, head.bias.grad)
        grads = tuple(grad[kept] if head.count else grad for grad in grads)  # type: ignore[index]
        found.append((logprobs, entropies, states.grad, squares, best, ids if head.count else kept[ids], *grads))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_response_with_an_id_that_is_no_token_is_named() -> None:
    engine = trainer(pair("llama")[1])
    for token in (7, 60, 95):
        batch = batch_of([torch.tensor([3])] * 2, [torch.tensor([4, 5]), torch.tensor([6, token])])
        with pytest.raises(DataError, match=rf"sample 1 has the token id {token} in its response.*0 to 59 without 2"):
            engine.forward(batch, ["logprobs"])


def test_a_model_that_embeds_fewer_tokens_than_the_tokenizer_has_is_refused() -> None:
    with pytest.raises(DataError, match=r"embeds 96 tokens.*ids 0 to 99"):
        as_causal_lm(build("llama"), tokens=TokenIds(100))


def test_the_ids_of_a_tokenizer_are_its_largest_and_what_is_missing_below(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abc")
    assert TokenIds.of(tokenizer) == TokenIds(6)
    tokenizer.add_tokens(["<x>"])
    assert TokenIds.of(tokenizer) == TokenIds(7)
    holed = TokenIds.among([5, 0, 2])
    assert holed == TokenIds(6, (1, 3, 4)) and str(holed) == "0 to 5 without 3 of them"
    assert 2 in holed and 1 not in holed and 6 not in holed and -1 not in holed
    assert TokenIds.from_json(json.loads(json.dumps(asdict(holed)))) == holed


def test_new_weights_keep_the_full_shape_on_their_way_out() -> None:
    model = as_causal_lm(new_model({"model_type": "llama", **SMALL}, seed=0), tokens=TokenIds(9))
    shapes = {name: tuple(tensor.shape) for name, tensor in trainer(model).export()}
    assert shapes["lm_head.weight"] == shapes["model.embed_tokens.weight"] == (17, 16)


SMALL = {
    "vocab_size": 17,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
