"""What routers do is counted by sample, balanced whatever the packing, and taken as it was recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.models.families import ROUTED
from tandem.models.layouts.packing import PackedLayout
from tandem.models.loading import as_causal_lm, new_model
from tandem.models.routers import Routers, decoded, encoded
from tandem.train.engine import FsdpEngine
from tandem.train.objective import PolicyObjective
from tests.train.agreeing import agree
from tools.families import FAMILIES, build

MakeBatch = Callable[..., DataProto]
MakeEngine = Callable[..., FsdpEngine]
MakeAny = Callable[..., Any]
Grads = Callable[[FsdpEngine], dict[str, torch.Tensor]]

QWEN3 = {
    "model_type": "qwen3_moe",
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "initializer_range": 0.3,
}
MIXTRAL = {
    **{
        key: QWEN3[key]
        for key in list(QWEN3)
        if "experts" not in key and key not in ("moe_intermediate_size", "norm_topk_prob")
    },
    "model_type": "mixtral",
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
ROUTERS_ALONE = PolicyObjective(router_coef=0.5, aggregation="seq-mean-token-mean")


def without_policy(batch: DataProto) -> DataProto:
    """Nothing is learned of advantages: what is left is the balance."""
    batch.batch["advantages"] = batch.ragged("responses").like(torch.zeros(len(batch.ragged("responses").values)))
    return batch


def with_routes(batch: DataProto, seed: int) -> DataProto:
    """Experts that were drawn, those of a prompt once for its group; a fifth of the tokens have none."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(tokens: int) -> torch.Tensor:
        experts = torch.rand(tokens, 2, 6, generator=generator).argsort(-1)[..., :2]
        experts[torch.rand(tokens, generator=generator) < 0.2] = -1
        return encoded(experts, 6)

    prompts, responses = batch.ragged("prompts"), batch.ragged("responses")
    groups = batch.dense("group_ids")
    every = [drawn(int(prompts.lengths[0])) for _ in range(int(groups.max()) + 1)]
    batch.batch["prompt_routes"] = Ragged.from_rows([every[group] for group in groups.tolist()])
    batch.batch["routes"] = responses.like(drawn(len(responses.values)))
    return batch


@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=8),
    seed=st.integers(0, 99),
    budget=st.sampled_from([14, 33]),
    aggregation=st.sampled_from(["token-mean", "seq-mean-token-mean"]),
    replayed=st.booleans(),
)
def test_the_balance_and_its_gradient_do_not_depend_on_splits_order_or_sharing(
    make_batch: MakeBatch,
    make_engine: MakeEngine,
    grads_of: Grads,
    lengths: list[int],
    seed: int,
    budget: int,
    aggregation: str,
    replayed: bool,
) -> None:
    batch = make_batch(lengths, group_size=3, seed=seed)
    if replayed:
        batch = with_routes(batch, seed)
    objective = PolicyObjective(router_coef=0.5, aggregation=aggregation)
    shuffled = batch.reorder(torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)))
    results = []
    for which, tokens, most in ((batch, 10_000, None), (shuffled, budget, None), (batch, 10_000, 1)):
        engine = make_engine(QWEN3, max_tokens=tokens, max_samples_per_micro_batch=most)
        total = engine.forward_backward(which, objective)
        assert total.routing is not None
        results.append((total.loss, total.routing.sums, grads_of(engine)))
    (loss, sums, grads), *others = results
    assert float(grads["model.model.layers.0.mlp.gate.weight"].abs().max()) > 1e-4
    for other_loss, other_sums, other in others:
        torch.testing.assert_close(other_loss, loss, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(other_sums, sums, atol=1e-4, rtol=1e-4)
        for name, grad in other.items():
            torch.testing.assert_close(grad, grads[name], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("shape", [QWEN3, MIXTRAL], ids=["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_of_one_sample_it_is_the_loss_of_plain_transformers(
    make_batch: MakeBatch, make_engine: MakeEngine, shape: dict[str, Any], checkpointed: bool
) -> None:
    batch = without_policy(make_batch([7], group_size=1))
    plain = new_model(shape, seed=0)
    engine = make_engine(shape, gradient_checkpointing=checkpointed)
    total = engine.forward_backward(batch, ROUTERS_ALONE)
    ids = torch.cat([batch.ragged("prompts").values, batch.ragged("responses").values])[None, :-1]
    logits = plain(input_ids=ids, output_router_logits=True, use_cache=False).router_logits
    balances = [load_balancing_loss_func((layer,), 6, 2) / 2 for layer in logits]  # 2: that of an even spread
    expected = 0.5 * torch.stack(balances).mean()
    expected.backward()
    torch.testing.assert_close(total.loss, expected.detach(), atol=1e-6, rtol=1e-5)
    found = dict(engine.model.model.named_parameters())
    for name, weight in plain.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(found[name].grad, weight.grad, atol=1e-6, rtol=1e-3, msg=name)


def test_loads_are_those_of_every_sample_with_its_prompt(make_batch: MakeBatch, make_engine: MakeEngine) -> None:
    batch = make_batch([5, 3, 8, 1], group_size=2)
    engine = make_engine(QWEN3)
    total = engine.forward_backward(batch, PolicyObjective())
    assert total.routing is not None
    plain = new_model(QWEN3, seed=0)
    counts, entropy, tokens = torch.zeros(2, 6), 0.0, 0
    for prompt, answer in zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True):
        ids = torch.cat([prompt, answer])[None, :-1]
        for layer, logits in enumerate(plain(input_ids=ids, output_router_logits=True, use_cache=False).router_logits):
            counts[layer] += torch.bincount(logits.topk(2).indices.flatten(), minlength=6)
            entropy += float(torch.distributions.Categorical(logits=logits.detach()).entropy().sum())
            tokens += len(logits)
    torch.testing.assert_close(total.routing.sums[:12].view(2, 6), counts)
    metrics = total.routing.metrics()
    loads = counts / counts.sum(1, keepdim=True) * 6
    assert metrics["moe/load_max"] == pytest.approx(float(loads.max()))
    assert metrics["moe/load_max_mean"] == pytest.approx(float(loads.max(1).values.mean()))
    assert metrics["moe/load_min"] == pytest.approx(float(loads.min()))
    assert metrics["moe/unused"] == float((counts == 0).float().mean())
    assert metrics["moe/entropy"] == pytest.approx(entropy / tokens, rel=1e-4)
    assert metrics["moe/balance"] >= 1.0 - 1e-4 and "moe/not_recorded" not in metrics


def test_training_on_the_balance_evens_the_loads(make_batch: MakeBatch, make_engine: MakeEngine) -> None:
    batch = without_policy(make_batch([9, 6, 8, 7], group_size=2))
    engine = make_engine(QWEN3)
    seen = []
    for _ in range(25):
        total = engine.forward_backward(batch, ROUTERS_ALONE)
        assert total.routing is not None
        seen.append(total.routing.metrics())
        engine.optim_step(ROUTERS_ALONE.denominator(batch))
    assert seen[-1]["moe/balance"] < seen[0]["moe/balance"]
    assert seen[-1]["moe/load_max_mean"] < seen[0]["moe/load_max_mean"]


@pytest.mark.parametrize("shape", [QWEN3, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_two_ranks_compute_what_one_does(
    on_ranks: MakeAny, make_batch: MakeBatch, make_engine: MakeEngine, shape: dict[str, Any]
) -> None:
    """Log-probs, loads, the gradients of routers and experts, a step and the export."""
    whole = make_batch([7, 2, 30, 5], group_size=2)
    objective = PolicyObjective(kl_coef=0.1, router_coef=0.5)

    def body(mesh: DeviceMesh, rank: int) -> None:
        for checkpointed in (False, True):
            one = make_engine(shape)
            many = make_engine(shape, mesh=mesh, max_tokens=34, gradient_checkpointing=checkpointed)
            losses = agree(one, many, whole, [[0, 1, 3], [2]][rank], objective)
            assert losses[0].routing is not None and losses[1].routing is not None
            torch.testing.assert_close(losses[0].routing.sums, losses[1].routing.sums, atol=1e-3, rtol=1e-4)

    on_ranks(2, body)


def test_a_model_without_experts_has_no_such_metrics_and_nothing_to_balance(
    make_batch: MakeBatch, make_engine: MakeEngine
) -> None:
    batch = make_batch([4, 2])
    engine = make_engine()
    assert engine.forward_backward(batch, PolicyObjective()).routing is None
    with pytest.raises(ContractError, match=r"'llama'.*router_aux_loss_coef: 0"):
        engine.forward_backward(batch, ROUTERS_ALONE)


@pytest.mark.parametrize("family", ROUTED)
def test_a_family_weighs_given_experts_as_its_own_router_does(family: str) -> None:
    """Its own choice, given back, changes no bit, forwards and backwards; another choice changes what comes out."""
    model = as_causal_lm(build(family))
    routers = model.routers
    assert routers is not None and model.route == "packed"
    ids = torch.arange(3, 20)
    layout = PackedLayout.of_lengths(torch.tensor([17]))

    def run(routes: torch.Tensor | None, watched: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        logits = model(ids, ids - 3, layout, lambda hidden, head: head.logits(hidden), None, routes, watched)
        logits.square().mean().backward()
        return logits.detach(), {n: p.grad.clone() for n, p in model.model.named_parameters() if p.grad is not None}

    logits, grads = run(None, watched=True)
    routes = routers.take_routes()
    assert routes.shape == (17, routers.width)
    same, same_grads = run(routes, watched=False)
    assert torch.equal(same, logits)
    assert all(torch.equal(grad, grads[name]) for name, grad in same_grads.items())
    others = (decoded(routes, routers.layers, routers.experts) + 1) % routers.experts
    assert float((run(encoded(others, routers.experts), watched=False)[0] - logits).abs().max()) > 1e-3
    some = torch.full_like(routes, 255)
    some[5] = encoded(others, routers.experts)[5]
    mixed = run(some, watched=False)[0]
    assert torch.equal(mixed[:5], logits[:5]) and not torch.equal(mixed[5:], logits[5:])


def test_families_whose_routers_are_known_are_those_that_have_the_usual_one() -> None:
    """What is not in the table runs as any model, and nothing of its routers is reported."""
    for family in ("phimoe", "ernie4_5_moe", "jetmoe"):
        assert as_causal_lm(build(family)).routers is None
    assert {*ROUTED} <= {*FAMILIES}


@pytest.mark.parametrize("experts", [6, 255, 256, 512])
def test_routes_are_bytes_and_come_back(experts: int) -> None:
    choices = torch.randint(experts, (9, 3, 2), generator=torch.Generator().manual_seed(0))
    choices[0, 0, 0], choices[0, 0, 1], choices[4] = experts - 1, 0, -1
    routes = encoded(choices, experts)
    assert routes.dtype == torch.uint8 and routes.shape == (9, 6 if experts < 256 else 12)
    assert torch.equal(decoded(routes, 3, experts), choices)
    assert bool((routes[4] == 255).all())


def test_routes_of_another_model_are_refused() -> None:
    routers = as_causal_lm(build("mixtral")).routers
    assert isinstance(routers, Routers)
    with pytest.raises(ContractError, match="of another model"):
        routers.begin(torch.zeros(3, routers.width + 1, dtype=torch.uint8), watched=False)
