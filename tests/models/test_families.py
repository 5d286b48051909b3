"""Models of many kinds give what plain transformers gives for each document alone, or are refused by name."""

from __future__ import annotations

import copy
import importlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from tandem.base.errors import ContractError, DataError
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.config.model import OptimConfig
from tandem.models.causal_lm import CausalLM
from tandem.models.head.logprobs import token_logprobs
from tandem.models.layouts.packing import Documents, pack_samples
from tandem.models.loading import as_causal_lm
from tandem.models.probe import prove
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import GroupRequest, Sampling
from tandem.train.engine import FsdpEngine
from tools.families import build

PACKED = ["llama", "diffllama", "dory", "hrm_text", "deepseek_v3", "gemma3_text"]
IN_ROWS = ["qwen3_next", "qwen3_5_text", "lfm2", "jamba", "bamba", "minimax", "falcon_h1", "falcon", "gemma2"]
ANEW = ["nemotron_h", "recurrent_gemma"]


def prompts_and_answers() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two groups of two answers, longer than the windows of the tiny models."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 96, (length,), generator=generator) for length in (11, 11, 5, 5)]
    prompts[1], prompts[3] = prompts[0], prompts[2]
    return prompts, [torch.randint(3, 96, (length,), generator=generator) for length in (9, 2, 4, 12)]


def packed_logprobs(model: CausalLM, prompts: list[torch.Tensor], answers: list[torch.Tensor]) -> torch.Tensor:
    rows = [Ragged.from_rows(tensors) for tensors in (prompts, answers)]
    mask = Ragged.from_rows([torch.ones(len(answer), dtype=torch.bool) for answer in answers])
    samples = pack_samples(*rows, mask, share_prompts=model.shares_prompts, layout=model.layout)
    values, _ = model(
        samples.input_ids,
        samples.positions,
        samples.layout,
        lambda hidden, head: token_logprobs(hidden[samples.read], head, samples.targets),
    )
    return samples.padded(values)


def alone(model: nn.Module, prompt: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=torch.cat([prompt, answer])[None], use_cache=False).logits[0].log_softmax(-1)
    found: torch.Tensor = logits[len(prompt) - 1 : -1].gather(1, answer[:, None])[:, 0]
    return found


def trained(family: str, **overrides: Any) -> tuple[nn.Module, CausalLM]:
    """A plain model, and its twin as it is trained."""
    plain = build(family, **overrides)
    model = as_causal_lm(copy.deepcopy(plain))
    prove(model, "training")
    return plain, model


@pytest.mark.parametrize("family", [*PACKED, *IN_ROWS, *ANEW])
def test_each_document_of_a_batch_gets_the_logprobs_that_it_gets_alone(family: str) -> None:
    plain, model = trained(family)
    assert model.route == ("packed" if family in PACKED else "rows")
    prompts, answers = prompts_and_answers()
    with torch.no_grad():
        found = packed_logprobs(model, prompts, answers)
        for row, prompt, answer in zip(found, prompts, answers, strict=True):
            torch.testing.assert_close(row[: len(answer)], alone(plain, prompt, answer), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "jamba"])
def test_changing_a_token_of_one_document_moves_no_other(family: str) -> None:
    _, model = trained(family)
    prompts, answers = prompts_and_answers()
    with torch.no_grad():
        before = packed_logprobs(model, prompts, answers)
        answers[0][0] = (answers[0][0] + 1) % 96
        after = packed_logprobs(model, prompts, answers)
    assert not torch.equal(before[0], after[0])
    torch.testing.assert_close(before[1:], after[1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "gemma2"])
def test_gradients_of_a_batch_are_the_sum_of_those_of_its_documents(family: str) -> None:
    plain, model = trained(family)
    prompts, answers = prompts_and_answers()
    packed_logprobs(model, prompts, answers).sum().backward()
    sum(alone(plain, prompt, answer).sum() for prompt, answer in zip(prompts, answers, strict=True)).backward()
    found = {name: p.grad for name, p in model.model.named_parameters()}
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, atol=2e-3, rtol=2e-3, msg=name)


@pytest.mark.parametrize("family", [*PACKED, *IN_ROWS, *ANEW])
def test_sampled_tokens_have_the_logprobs_of_a_plain_forward(family: str) -> None:
    plain = build(family)
    engine = HfEngine(as_causal_lm(copy.deepcopy(plain)))
    prompts, _ = prompts_and_answers()
    requests = [GroupRequest(key, prompt, (2 * key, 2 * key + 1)) for key, prompt in enumerate(prompts[1:])]
    stops = tuple(range(0, 96, 9))  # so that rows end at different times
    for output in engine.generate(requests, Sampling(n=2, max_tokens=8, stop_token_ids=stops)):
        for sample in output.samples:
            with torch.no_grad():
                expected = alone(plain, output.request.prompt_ids, sample.token_ids)
            torch.testing.assert_close(sample.logprobs, expected, atol=2e-4, rtol=1e-3)


class Leaky(nn.Module):
    """A layer that adds to each token what stands before it in its row, whoever's that is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(states + states.cumsum(1) * 0.1, *args, **kwargs)


def test_a_mixer_that_no_name_announces_is_found_by_the_probe() -> None:
    plain = build("llama")
    plain.model.layers[0].mlp = Leaky(plain.model.layers[0].mlp)
    model = as_causal_lm(plain)
    prove(model, "training")
    assert model.route == "rows"


def test_a_model_that_sees_later_tokens_is_refused_by_the_name_of_its_family() -> None:
    plain = build("llama")
    for layer in plain.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: output + args[0].flip(1))
    with pytest.raises(DataError, match="the model family 'llama' can't be used for training"):
        prove(as_causal_lm(plain), "training")


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("hyperclovax", {"logits_scaling": 0.25}),
        ("granite", {"logits_scaling": 8.0}),
        ("minicpm3", {}),
        ("gemma4_text", {"final_logit_softcapping": 3.0}),
        ("nanochat", {}),
        ("cohere", {}),
    ],
)
def test_the_heads_logits_are_the_models_own(family: str, overrides: dict[str, Any]) -> None:
    plain, model = trained(family, **overrides)
    ids = torch.arange(5, 17)
    with torch.no_grad():
        layout = model.layout(Documents.consecutive(torch.tensor([len(ids)])), "cpu")
        found = model(ids, torch.arange(len(ids)), layout, lambda hidden, head: head.logits(hidden))
        torch.testing.assert_close(found, plain(input_ids=ids[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_a_head_that_does_more_than_a_factor_and_a_softcap_is_refused() -> None:
    plain = build("llama")
    forward = plain.forward

    def bent(**inputs: Any) -> Any:
        output = forward(**inputs)
        output.logits = output.logits.sin()
        return output

    plain.forward = bent
    with pytest.raises(DataError, match=r"'llama' does more between"):
        as_causal_lm(plain)


LONGROPE = {
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 16,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
}
DYNAMIC = {"max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}


@pytest.mark.parametrize(("family", "overrides"), [("phi3", LONGROPE), ("llama", DYNAMIC)])
def test_no_document_goes_beyond_where_the_factor_of_its_rope_moves(family: str, overrides: dict[str, Any]) -> None:
    model = as_causal_lm(build(family, **overrides))
    assert model.context is not None and model.context.tokens == 16
    engine = HfEngine(model)
    with pytest.raises(ContractError, match=r"stands still for 16 tokens.*lower max_tokens"):
        list(engine.generate([GroupRequest(0, torch.arange(3, 15), (0,))], Sampling(n=1, max_tokens=5)))
    trainer = FsdpEngine(model, optim=OptimConfig(), total_updates=1, max_tokens_per_micro_batch=64, temperature=1.0)
    for length, fits in ((4, True), (5, False)):
        answer = Ragged.from_rows([torch.arange(3, 5), torch.arange(3, 3 + length)])
        prompt = Ragged.from_rows([torch.arange(3, 15)] * 2)
        mask = answer.like(torch.ones(len(answer.values), dtype=torch.bool))
        batch = DataProto({"prompts": prompt, "responses": answer, "response_mask": mask})
        with nullcontext() if fits else pytest.raises(DataError, match="sample 1 has 17 tokens, and the factor"):
            trainer.forward(batch, ["logprobs"])


def test_layers_that_are_told_the_borders_of_documents_run_them_in_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that keep packed documents apart, as packages for devices bring them."""
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    convolve, attend = module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule

    def convolve_apart(states: torch.Tensor, *args: Any, seq_idx: Any = None, **options: Any) -> torch.Tensor:
        options = {"activation": options["activation"]}
        if seq_idx is None:
            return convolve(states, *args, **options)
        sizes = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
        return torch.cat([convolve(part, *args, **options) for part in states.split(sizes, -1)], -1)

    def attend_apart(*tensors: torch.Tensor, g: Any, beta: Any, cu_seqlens: Any = None, **options: Any) -> Any:
        for name in ("seq_idx", "layout"):
            options.pop(name, None)
        if cu_seqlens is None:
            return attend(*tensors, g=g, beta=beta, **options)
        sizes = cu_seqlens.diff().tolist()
        parts = zip(*(tensor.split(sizes, 1) for tensor in (*tensors, g, beta)), strict=True)
        return torch.cat([attend(*part[:3], g=part[3], beta=part[4], **options)[0] for part in parts], 1), None

    monkeypatch.setattr(module, "causal_conv1d_fn", convolve_apart)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", attend_apart)
    plain, model = trained("qwen3_next")
    assert model.route == "bordered"
    prompts, answers = prompts_and_answers()
    with torch.no_grad():
        found = packed_logprobs(model, prompts, answers)
        for row, prompt, answer in zip(found, prompts, answers, strict=True):
            torch.testing.assert_close(row[: len(answer)], alone(plain, prompt, answer), atol=2e-4, rtol=1e-3)
        (output,) = HfEngine(model).generate([GroupRequest(0, prompts[0], (1, 2))], Sampling(n=2, max_tokens=6))
        assert model.route == "bordered"
        for sample in output.samples:
            torch.testing.assert_close(
                sample.logprobs, alone(plain, prompts[0], sample.token_ids), atol=2e-4, rtol=1e-3
            )
