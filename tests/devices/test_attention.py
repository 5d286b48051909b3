"""On an accelerator no attention makes a table of all scores of a document; what it gives is what the CPU gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.models.layouts.packing import banded, causal_attention, windowed_attention
from tandem.train.objective import SftObjective
from tests.devices import sim
from tests.train.conftest import LLAMA, build_batch, build_engine


@given(
    length=st.integers(1, 23),
    window=st.integers(1, 23),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    batch=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_attention_in_blocks_is_that_behind_one_mask(
    length: int, window: int, heads: tuple[int, int], batch: int, seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, count, length, size, generator=noise, dtype=torch.float64, requires_grad=True)
        for count, size in ((heads[0], 4), (heads[1], 4), (heads[1], 6))
    )
    whole = causal_attention(q, k, v, 0.7, banded(length, window, torch.device("cpu")))
    blocks = windowed_attention(q, k, v, 0.7, window)
    torch.testing.assert_close(blocks, whole)
    weights = torch.randn(whole.shape, generator=noise, dtype=torch.float64)
    for found, expected in zip(
        torch.autograd.grad((blocks * weights).sum(), (q, k, v)),
        torch.autograd.grad((whole * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [{"model_type": "llama"}, {"model_type": "mistral", "sliding_window": 3}])
def test_grouped_heads_and_windows_need_no_table_of_scores(shape: dict[str, object]) -> None:
    batch, objective = build_batch([5, 9, 2]), SftObjective()
    model = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2, **shape}
    here, there = (build_engine(model, seed=3, device=device) for device in ("cpu", "sim:1"))
    sim.plain_attention.clear()
    for engine in (here, there):
        engine.forward_backward(batch, objective)
        engine.optim_step(objective.denominator(batch))
    assert sim.plain_attention == []
    for (name, weight), (_, other) in zip(here.export(), there.export(), strict=True):
        torch.testing.assert_close(other.cpu(), weight, atol=2e-5, rtol=1e-5, msg=name)
