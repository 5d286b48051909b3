"""Rows that ranks share are whole ones: same log-probs, losses, gradients and weights within rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tandem.base.errors import DataError
from tandem.config.model import OptimConfig
from tandem.models.adapter_spec import AdapterSpec
from tandem.models.adapters import with_adapters
from tandem.models.loading import as_causal_lm, new_model
from tandem.train.sharding import rank_mesh
from tests.train.agreeing import agree
from tests.train.conftest import GPT2, LLAMA

MakeAny = Callable[..., Any]

SHAPE = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2}
CALM = OptimConfig(lr=1e-3, eps=1e-3)
"""A gradient that is 0 but for rounding, as that of a bias of keys, moves nothing."""
WINDOW = {**SHAPE, "model_type": "mistral", "sliding_window": 3}


def adapted() -> Any:
    """With adapters that change something."""
    model = with_adapters(new_model(SHAPE, seed=0), AdapterSpec(rank=2, alpha=4.0, seed=3))
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=noise) * 0.1)
    return as_causal_lm(model)


def test_two_ranks_that_share_rows_give_what_one_gives(
    on_ranks: MakeAny, make_batch: MakeAny, make_engine: MakeAny
) -> None:
    """Rows of odd lengths, and answers that are all on one of the ranks."""
    whole = make_batch([4, 7, 3, 9])

    def body(mesh: DeviceMesh, rank: int) -> None:
        mesh = rank_mesh("cpu", 2, sequence_parallel=2)
        for shape in (SHAPE, GPT2, WINDOW):
            one = make_engine(shape, optim=CALM)
            many = make_engine(shape, optim=CALM, mesh=mesh, max_tokens=26, gradient_checkpointing=True)
            agree(one, many, whole, [0, 1, 2, 3])
        agree(make_engine(model=adapted()), make_engine(model=adapted(), mesh=mesh), whole, [0, 1, 2, 3])
        with pytest.raises(DataError, match="1 heads of keys and values can't be shared by 2 devices"):
            make_engine(LLAMA, mesh=mesh)
        lone = as_causal_lm(new_model(SHAPE, seed=0))
        lone.take("rows")
        with pytest.raises(DataError, match="documents of the model family 'llama' can't be shared"):
            make_engine(model=lone, mesh=mesh)

    on_ranks(2, body)


def test_two_groups_of_two_ranks_each_give_what_one_gives(
    on_ranks: MakeAny, make_batch: MakeAny, make_engine: MakeAny
) -> None:
    """Samples differ between groups, one of which has more micro-batches; one token has a row of its own."""
    whole = make_batch([4, 6, 3, 9, 1], prompt_length=1)

    def body(mesh: DeviceMesh, rank: int) -> None:
        many = make_engine(SHAPE, mesh=rank_mesh("cpu", 4, sequence_parallel=2), max_tokens=12)
        agree(make_engine(SHAPE), many, whole, [[0, 1, 2, 3], [4]][rank // 2])

    on_ranks(4, body)
