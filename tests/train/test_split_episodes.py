"""An episode whose context begins anew is trained as the unsplit one wherever the new context says the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.train.engine import FsdpEngine
from tandem.train.objective import PolicyObjective
from tests.train.test_engine import AGGREGATIONS

SAMPLES = st.integers(2, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1)))
"""Tokens of a sample, and where it is split."""

TOKEN_COLUMNS = ("advantages", "old_logprobs", "ref_logprobs")


def split(batch: DataProto, cuts: list[int]) -> DataProto:
    """The same samples; before token ``cut`` of each, all that was there stands once more, as a context of its own."""
    found: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("responses", "response_mask", "restarts", *TOKEN_COLUMNS)
    }
    for row, cut in enumerate(cuts):
        item = batch[row].batch
        said, length = item["responses"], len(item["responses"])
        again = torch.cat([item["prompts"], said[:cut]])
        inside = torch.zeros(length + len(again), dtype=torch.bool)
        inside[cut : cut + len(again)] = True
        found["responses"].append(torch.cat([said[:cut], again, said[cut:]]))
        found["response_mask"].append(~inside)
        found["restarts"].append(torch.arange(len(inside)) == cut)
        for name in TOKEN_COLUMNS:
            values = torch.full((len(inside),), 7.5)  # what stands on tokens that were not sampled doesn't matter
            found[name].append(values.masked_scatter(~inside, item[name]))
    columns = {name: Ragged.from_rows(rows) for name, rows in found.items()}
    kept = {name: batch.batch[name] for name in ("prompts", "group_ids", "sample_index")}
    return DataProto({**kept, **columns})


@settings(max_examples=10)
@given(
    samples=st.lists(SAMPLES, min_size=2, max_size=6),
    aggregation=st.sampled_from(AGGREGATIONS),
    budget=st.sampled_from([40, 10_000]),
)
def test_the_gradient_and_its_denominator_are_those_of_the_unsplit_episode(
    make_batch: Callable[..., DataProto],
    make_engine: Callable[..., FsdpEngine],
    grads_of: Callable[[FsdpEngine], dict[str, torch.Tensor]],
    gpt2: dict[str, Any],
    samples: list[tuple[int, int]],
    aggregation: str,
    budget: int,
) -> None:
    whole = make_batch([length for length, _ in samples], group_size=2)
    objective = PolicyObjective(aggregation=aggregation, norm=7.0, kl_coef=0.1, entropy_coef=0.01)
    results = []
    for batch in (whole, split(whole, [cut for _, cut in samples])):
        engine = make_engine(gpt2, double=True, max_tokens=budget)
        results.append((engine.forward_backward(batch, objective), objective.denominator(batch), grads_of(engine)))
    (total, denominator, grads), (other, others, moved) = results
    assert denominator == others
    torch.testing.assert_close(other.loss, total.loss, atol=1e-10, rtol=1e-10)
    for name, metric in total.metrics.items():
        assert other.metrics[name].mean == pytest.approx(metric.mean, abs=1e-9)
    for name, grad in grads.items():
        torch.testing.assert_close(moved[name], grad, atol=1e-10, rtol=1e-10)


def test_without_the_mark_it_would_be_another_gradient(
    make_batch: Callable[..., DataProto], make_engine: Callable[..., FsdpEngine]
) -> None:
    batch = split(make_batch([6, 5]), [3, 2])
    marked = make_engine(double=True).forward_backward(batch, PolicyObjective()).loss
    del batch.batch["restarts"]
    unmarked = make_engine(double=True).forward_backward(batch, PolicyObjective()).loss
    assert float(unmarked) != pytest.approx(float(marked))
