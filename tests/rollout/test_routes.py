"""The engine records which experts each token went to, and a trainer that takes them finds the engine's log-probs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.config.model import OptimConfig
from tandem.data.prompts import Prompt
from tandem.models.loading import as_causal_lm, new_model
from tandem.models.routers import decoded
from tandem.roles.rollout.generation import as_batch
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import GroupOutput, GroupRequest, Sampling
from tandem.rollout.sound import sound_outputs
from tandem.rollout.wire import Message, pack_request, pack_samples, unpack_request, unpack_samples
from tandem.train.engine import FsdpEngine
from tandem.train.objective import PolicyObjective
from tests.train.test_routers import MIXTRAL, QWEN3

ONE_OF_SIX = {**QWEN3, "num_experts_per_tok": 1, "norm_topk_prob": False}
STOPS = (3, 9, 14)


def requests() -> list[GroupRequest]:
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(23, (length,), generator=generator) for length in (5, 2, 7)]
    return [GroupRequest(key, prompt, (3 * key, 3 * key + 1)) for key, prompt in enumerate(prompts)]


def sampling(routes: int = 4, **changes: Any) -> Sampling:
    """Two layers with two experts a token are 4 bytes."""
    return Sampling(**{"n": 2, "max_tokens": 9, "stop_token_ids": STOPS, "routes": routes, **changes})


def chosen(plain: nn.Module, ids: torch.Tensor, count: int) -> torch.Tensor:
    """The experts (T, L, k) of plain transformers, which sees the whole row at once."""
    logits = plain(input_ids=ids[None], output_router_logits=True, use_cache=False).router_logits
    return torch.stack([layer.topk(count).indices for layer in logits], 1)


def check(plain: nn.Module, output: GroupOutput, experts: int = 6, count: int = 2) -> None:
    prompt = output.request.prompt_ids
    assert output.prompt_routes is not None
    for sample in output.samples:
        assert sample.routes is not None and sample.routes.dtype == torch.uint8
        expected = chosen(plain, torch.cat([prompt, sample.token_ids[:-1]]), count)
        found = decoded(torch.cat([output.prompt_routes, sample.routes[:-1]]), 2, experts)
        assert torch.equal(found, expected)
        assert bool((sample.routes[-1] == 255).all())


@pytest.mark.parametrize(
    ("shape", "exact"),
    [(QWEN3, False), (QWEN3, True), (MIXTRAL, False), ({**QWEN3, "num_experts": 300}, False)],
    ids=["qwen3_moe", "exact", "mixtral", "two bytes"],
)
def test_each_token_has_the_experts_that_plain_transformers_sends_it_to(shape: dict[str, Any], exact: bool) -> None:
    plain = new_model(shape, seed=0)
    engine = HfEngine(as_causal_lm(copy.deepcopy(plain)), exact=exact, max_num_seqs=4)
    experts = shape.get("num_experts", 6)
    with torch.no_grad():
        for output in sound_outputs(engine, iter(requests()), sampling(8 if experts > 255 else 4)):
            check(plain, output, experts)


@pytest.mark.parametrize("n", [1, 2])
def test_what_was_aborted_keeps_its_routes_and_goes_on(n: int) -> None:
    plain = new_model(QWEN3, seed=0)
    engine = HfEngine(as_causal_lm(copy.deepcopy(plain)))
    drawn = sampling(n=n, stop_token_ids=())
    asked = [GroupRequest(r.key, r.prompt_ids, r.seeds[:n]) for r in requests()]

    def source() -> Iterator[GroupRequest | None]:
        yield from asked
        yield None
        yield None
        engine.pause(abort=True)
        engine.resume()

    begun = list(engine.generate(source(), drawn))
    assert all(output.aborted for output in begun)
    assert all(0 < len(sample.token_ids) < 9 for output in begun for sample in output.samples)
    with torch.no_grad():
        resumed = list(engine.generate((output.resumed() for output in begun), drawn))
        assert len(resumed) == 3
        for output in resumed:
            check(plain, output)


def batch_of(outputs: list[GroupOutput]) -> DataProto:
    def one(output: GroupOutput) -> DataProto:
        ids = tuple(output.request.prompt_ids.tolist())
        return as_batch(Prompt(str(output.request.key), ids, ""), output, int(output.request.key), None)

    batch = DataProto.concat([one(output) for output in outputs])
    responses = batch.ragged("responses")
    batch.batch["advantages"] = responses.like(torch.ones(len(responses.values)))
    return batch


def trainer(model: nn.Module) -> FsdpEngine:
    return FsdpEngine(
        as_causal_lm(model),  # type: ignore[arg-type]
        optim=OptimConfig(),
        total_updates=9,
        max_tokens_per_micro_batch=60,
        temperature=1.0,
    )


def without_routes(batch: DataProto) -> DataProto:
    return batch.select(*(name for name in batch.batch if "routes" not in name))


def test_where_a_router_is_torn_replay_finds_the_engines_logprobs_and_a_forward_of_its_own_does_not() -> None:
    """Experts come in pairs that every token likes alike; noise below what a log-prob shows decides between them."""
    plain = new_model(ONE_OF_SIX, seed=0)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            if name.endswith("gate.weight"):
                weight[1::2] = weight[::2]
    other = copy.deepcopy(plain)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if name.endswith("gate.weight"):
                weight += 1e-6 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    outputs = list(HfEngine(as_causal_lm(plain)).generate(requests(), sampling(2)))
    batch, engine = batch_of(outputs), trainer(other)
    sampled = batch.ragged("rollout_logprobs").values
    replayed = engine.forward(batch, ["logprobs"])["logprobs"].values
    alone = engine.forward(without_routes(batch), ["logprobs"])["logprobs"].values
    torch.testing.assert_close(replayed, sampled, atol=1e-5, rtol=0)
    assert float((alone - sampled).abs().max()) > 1e-2
    total = engine.forward_backward(batch, PolicyObjective())
    assert total.routing is not None and total.metrics["mismatch/abs"].mean <= 1e-5
    metrics = total.routing.metrics()
    assert 0.2 < metrics["moe/replayed_otherwise"] < 0.8 and metrics["moe/not_recorded"] == 0.0
    gates = {name: weight for name, weight in other.named_parameters() if name.endswith("gate.weight")}
    assert all(bool(weight.grad.abs().sum() > 0) for weight in gates.values() if weight.grad is not None)
    assert all(weight.grad is not None for weight in gates.values())


@pytest.mark.parametrize("shape", [QWEN3, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_with_equal_weights_replay_changes_no_bit(shape: dict[str, Any]) -> None:
    plain = new_model(shape, seed=0)
    outputs = list(HfEngine(as_causal_lm(copy.deepcopy(plain))).generate(requests(), sampling()))
    batch, results = batch_of(outputs), []
    for one in (batch, without_routes(batch)):
        engine = trainer(copy.deepcopy(plain))
        logprobs = engine.forward(one, ["logprobs"])["logprobs"].values
        total = engine.forward_backward(one, PolicyObjective(router_coef=0.1))
        grads = {n: p.grad for n, p in engine.model.named_parameters() if p.grad is not None}
        results.append((logprobs, total, grads))
    (logprobs, total, grads), (own_logprobs, own_total, own_grads) = results
    assert total.routing is not None and total.routing.metrics()["moe/replayed_otherwise"] == 0.0
    assert torch.equal(logprobs, own_logprobs) and torch.equal(total.loss, own_total.loss)
    assert grads.keys() == own_grads.keys() and all(torch.equal(grads[name], own_grads[name]) for name in grads)


def test_routes_travel_between_processes_and_into_files(tmp_path: Any) -> None:
    plain = new_model(QWEN3, seed=0)
    outputs = list(HfEngine(as_causal_lm(plain)).generate(requests(), sampling()))
    fields, tensors = pack_samples(outputs[0].samples)
    for sample, sent in zip(outputs[0].samples, unpack_samples(fields, tensors), strict=True):
        assert sample.routes is not None and sent.routes is not None and torch.equal(sample.routes, sent.routes)
    asked, tensors = pack_request(outputs[0].resumed())
    (begun, _) = unpack_request(Message("request", asked, tensors)).begun
    assert begun.routes is not None and torch.equal(begun.routes, outputs[0].samples[0].routes)  # type: ignore[arg-type]
    batch = batch_of(outputs)
    batch.save(tmp_path / "batch")
    saved = DataProto.load(tmp_path / "batch")
    for name in ("routes", "prompt_routes"):
        assert torch.equal(saved.ragged(name).values, batch.ragged(name).values)


def test_an_engine_that_does_not_record_what_was_asked_is_named() -> None:
    plain = new_model(QWEN3, seed=0)
    engine = HfEngine(as_causal_lm(plain))
    with pytest.raises(ContractError, match="routes of 9 bytes a token are asked of a model that makes 4"):
        list(engine.generate(requests(), sampling(9)))

    class Forgetful:
        def generate(self, asked: Any, drawn: Sampling) -> Iterator[GroupOutput]:
            yield from engine.generate(asked, Sampling(n=2, max_tokens=3))

    silent: Any = Forgetful()
    with pytest.raises(ContractError, match=r"Forgetful gave sample 0 of group \d with routes None instead of"):
        list(sound_outputs(silent, requests(), sampling()))


def test_a_model_without_known_routers_records_nothing() -> None:
    shape = {**QWEN3, "model_type": "llama"}
    engine = HfEngine(as_causal_lm(new_model(shape, seed=0)))
    with pytest.raises(ContractError, match="the family 'llama' has no routers that are known"):
        list(engine.generate(requests(), Sampling(n=2, max_tokens=3, routes=4)))
