"""Preference losses through the engine: packing, micro-batches and ranks change neither sum nor gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.algorithms import PREFERENCE_LOSSES
from tandem.columns.proto import DataProto
from tandem.train.engine import FsdpEngine
from tandem.train.preference import PreferenceObjective
from tests.train.conftest import GPT2, build_batch, build_engine, gradients

LENGTHS = [7, 2, 12, 4, 9, 1, 3, 5]
NAMES = PREFERENCE_LOSSES.names()


def pairs() -> DataProto:
    batch = build_batch(LENGTHS)
    batch.batch["preferred"] = batch.dense("sample_index") == 0
    batch.batch["reference_point"] = torch.full((len(batch),), 0.3)
    return batch


def engine(**options: Any) -> FsdpEngine:
    return build_engine(shape=GPT2, double=True, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [32, 64, 10_000])
def test_micro_batches_change_nothing(name: str, budget: int) -> None:
    batch, objective = pairs(), PreferenceObjective(name)
    mixed = batch.reorder(torch.randperm(8, generator=torch.Generator().manual_seed(budget)))
    whole, cut = engine(), engine(max_tokens=budget)
    one, other = whole.forward_backward(batch, objective), cut.forward_backward(mixed, objective)
    assert float(other.loss) == pytest.approx(float(one.loss), rel=1e-6)
    assert {k: m.mean for k, m in other.metrics.items()} == pytest.approx(
        {k: m.mean for k, m in one.metrics.items()}, rel=1e-5
    )
    expected = gradients(whole)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for parameter, gradient in gradients(cut).items():
        torch.testing.assert_close(gradient, expected[parameter], atol=1e-6 * scale, rtol=1e-5)


def test_pairs_divide_by_pairs_and_answers_by_answers() -> None:
    batch = pairs()
    assert PreferenceObjective("dpo").denominator(batch) == 4.0
    assert PreferenceObjective("kto").denominator(batch) == 8.0


def test_the_engine_s_sum_is_the_formula_s(make_engine: Any) -> None:
    batch, made = pairs(), make_engine()
    logprobs = made.forward(batch, ["logprobs"])["logprobs"]
    ref = batch.ragged("ref_logprobs")
    ratios = [float((a - b).sum()) for a, b in zip(logprobs.rows(), ref.rows(), strict=True)]
    expected = sum(
        float(torch.nn.functional.softplus(torch.tensor(-0.1 * (ratios[2 * i] - ratios[2 * i + 1])))) for i in range(4)
    )
    found = made.forward_backward(batch, PreferenceObjective("dpo")).loss
    assert float(found) == pytest.approx(expected, rel=1e-5)
