"""The critic's engine: the value of the state before each token, one update whatever it was cut into."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.config.model import OptimConfig
from tandem.train.value_engine import ValueEngine
from tandem.train.value_objective import ValueObjective
from tests.train.conftest import GPT2, gradients
from tests.train.values import value_engine, valued_batch

AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def values_of(engine: ValueEngine, batch: DataProto) -> Ragged:
    return engine.forward(batch, ["values"])["values"]


def test_a_value_is_that_of_the_state_before_its_token() -> None:
    """As plain transformers has it at the token before: the last of the prompt for the first of the answer."""
    engine, batch = value_engine(), valued_batch([5, 1, 3, 8])
    values = values_of(engine, batch)
    for i in range(len(batch)):
        prompt, answer = batch.ragged("prompts")[i], batch.ragged("responses")[i]
        ids = torch.cat([prompt, answer])
        engine.model.model.set_attn_implementation("eager")
        plain = engine.model.model(ids[None]).logits[0, :, 0]
        engine.model.model.set_attn_implementation("tandem")
        torch.testing.assert_close(values[i], plain[len(prompt) - 1 : -1].detach(), atol=1e-5, rtol=1e-4)


def test_a_token_changes_no_value_before_it_nor_its_own() -> None:
    engine, batch = value_engine(), valued_batch([6], group_size=1)
    before = values_of(engine, batch).values
    changed = batch.ragged("responses").values.clone()
    changed[3] = (changed[3] + 1) % 23
    batch.batch["responses"] = batch.ragged("responses").like(changed)
    after = values_of(engine, batch).values
    torch.testing.assert_close(after[:4], before[:4], atol=1e-6, rtol=0)
    assert float((after[4:] - before[4:]).abs().min()) > 1e-4


def test_tokens_of_tools_have_no_value_and_are_seen_all_the_same() -> None:
    engine, batch = value_engine(), valued_batch([7, 4])
    whole = values_of(engine, batch).values
    mask = torch.tensor([True, True, False, False, True, True, True, False, True, True, True])
    batch.batch["response_mask"] = batch.ragged("responses").like(mask)
    values = values_of(engine, batch).values
    assert not values[~mask].any()
    torch.testing.assert_close(values[mask], whole[mask], atol=1e-6, rtol=1e-5)


@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=10),
    seed=st.integers(0, 99),
    budget=st.sampled_from([16, 33, 70]),
    aggregation=st.sampled_from(AGGREGATIONS),
    cliprange=st.sampled_from([0.2, math.inf]),
)
def test_b17_b18_gradients_do_not_depend_on_splits_or_order(
    lengths: list[int], seed: int, budget: int, aggregation: str, cliprange: float
) -> None:
    batch = valued_batch(lengths, group_size=3, seed=seed, masked=True)
    objective = ValueObjective(cliprange, aggregation, norm=7.0)
    shuffled = batch.reorder(torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)))
    results = []
    for which, tokens in ((batch, 10_000), (batch, budget), (shuffled, budget)):
        engine = value_engine(shape=GPT2, double=True, max_tokens=tokens)
        total = engine.forward_backward(which, objective)
        assert objective.denominator(which) == objective.denominator(batch)
        results.append((total, gradients(engine)))
    (first, grads), *others = results
    for total, other in others:
        torch.testing.assert_close(total.loss, first.loss, atol=1e-10, rtol=1e-10)
        for name, metric in total.metrics.items():
            assert metric.mean == pytest.approx(first.metrics[name].mean, abs=1e-9)
        assert other.keys() == grads.keys()
        for name, grad in other.items():
            torch.testing.assert_close(grad, grads[name], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("cliprange", [0.3, math.inf])
def test_the_gradient_of_the_head_is_that_of_finite_differences(cliprange: float) -> None:
    engine = value_engine(shape=GPT2, double=True)
    batch, objective = valued_batch([5, 2, 7], masked=True), ValueObjective(cliprange)

    def loss() -> float:
        return float(engine.forward_backward(batch, objective).loss)

    loss()
    head, step = engine.model.head, 1e-6
    assert head.bias is not None
    assert head.weight.grad is not None and head.bias.grad is not None
    grads = head.weight.grad.clone().flatten(), head.bias.grad.clone()
    for parameter, grad in zip((head.weight, head.bias), grads, strict=True):
        flat = parameter.data.view(-1)
        for i in range(0, len(flat), 5):
            found = []
            for sign in (1, -1):
                flat[i] += sign * step
                found.append(loss())
                flat[i] -= sign * step
            assert (found[0] - found[1]) / (2 * step) == pytest.approx(float(grad[i]), rel=1e-5, abs=1e-7)


def test_b19_b17_a_loss_by_hand() -> None:
    """Of 4 tokens 3 are trained: 0.5 x ((1 - 0)^2 + (1 - 3)^2 + clipped) / 3; a NaN at a tool's token is nothing."""
    engine = value_engine()
    with torch.no_grad():
        engine.model.head.weight.zero_()
        assert engine.model.head.bias is not None
        engine.model.head.bias.fill_(1.0)
    batch = valued_batch([3, 1], group_size=1)
    responses = batch.ragged("responses")
    batch.batch["values"] = responses.like(torch.tensor([1.0, 1.0, float("nan"), 0.0]))
    batch.batch["returns"] = responses.like(torch.tensor([0.0, 3.0, float("nan"), 1.0]))
    batch.batch["response_mask"] = responses.like(torch.tensor([True, True, False, True]))
    objective = ValueObjective(0.25)
    total = engine.forward_backward(batch, objective)
    # the last may move from 0 to 0.25 only: 0.75^2 is more than the free term, 0
    assert float(total.loss) / objective.denominator(batch) == pytest.approx(0.5 * (1 + 4 + 0.75**2) / 3)
    assert total.metrics["value_clipfrac"].mean == pytest.approx(1 / 3)
    free = engine.forward_backward(batch, ValueObjective(math.inf))
    assert float(free.loss) == pytest.approx(0.5 * (1 + 4))
    assert free.metrics["value_clipfrac"].mean == 0


def test_bit_equal_in_any_company_under_exact() -> None:
    batch = valued_batch([5, 2, 7, 1, 4, 4], group_size=2)
    engine = value_engine(exact=True)
    whole = values_of(engine, batch)
    some = values_of(engine, batch[[4, 5, 0, 1]])
    assert torch.equal(torch.cat([some[0], some[3]]), torch.cat([whole[4], whole[1]]))


def test_it_learns_what_it_is_shown() -> None:
    batch, objective = valued_batch([5, 3, 6, 4]), ValueObjective(math.inf)
    engine = value_engine(optim=OptimConfig(lr=1e-2))
    losses = []
    for _ in range(60):
        losses.append(float(engine.forward_backward(batch, objective).loss))
        assert engine.optim_step(objective.denominator(batch)).applied
    assert losses[-1] < 0.1 * losses[0]
