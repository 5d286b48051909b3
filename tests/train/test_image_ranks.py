"""Image models sharded over ranks: an image tower that only some ranks have images for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tandem.config.model import OptimConfig
from tandem.models.loading import as_causal_lm
from tandem.models.vision.images import freeze
from tandem.train.engine import FsdpEngine
from tandem.train.objective import SftObjective
from tests.images.batches import batch
from tests.images.tiny import picture, plain_model

SPLITS = ([[0, 1], [2, 3]], [[0], [1, 2, 3]], [[], [0, 1, 2, 3]], [[2], [3]])
"""Rows of each rank: images on one alone, more micro-batches on one, none on one, images on neither."""


def engine(family: str, mesh: DeviceMesh | None, frozen: bool = False) -> FsdpEngine:
    plain = plain_model(family)
    freeze(plain, ["vision_tower", "projector"] if frozen else [])
    optim = OptimConfig(lr=1e-2, weight_decay=0.1)
    return FsdpEngine(
        as_causal_lm(plain), optim=optim, total_updates=10, max_tokens_per_micro_batch=12, temperature=1.0, mesh=mesh
    )


@pytest.mark.parametrize(("family", "frozen"), [("qwen3_vl", False), ("qwen3_5", False), ("qwen2_5_vl", True)])
def test_images_on_one_rank_give_the_update_of_one(
    on_ranks: Callable[[int, Callable[[DeviceMesh, int], None]], None], family: str, frozen: bool
) -> None:
    whole = batch(
        [
            (picture((4, 4)), [3, 4], [6, 7]),
            (picture((2, 6), seed=1), [3, 5], [8]),
            (None, [3, 4, 5], [7, 6]),
            (None, [4], [8]),
        ]
    )

    def body(mesh: DeviceMesh, rank: int) -> None:
        single, sharded = engine(family, None, frozen), engine(family, mesh, frozen)
        for split in SPLITS:
            mine, rows = whole[split[rank]], sorted(row for part in split for row in part)
            expected = single.forward(whole, ["logprobs"])["logprobs"].take(
                torch.tensor(split[rank], dtype=torch.int64)
            )
            torch.testing.assert_close(sharded.forward(mine, ["logprobs"])["logprobs"].values, expected.values)
            results: list[Any] = []
            for one, part in ((single, whole[rows]), (sharded, mine)):
                loss = one.forward_backward(part, SftObjective()).loss
                results.append((loss, one.optim_step(4.0)))
            (loss, result), (shared_loss, shared_result) = results
            torch.testing.assert_close(shared_loss, loss)
            assert shared_result.grad_norm == pytest.approx(result.grad_norm, rel=1e-4)
            weights, others = dict(single.export()), dict(sharded.export())
            for name, weight in weights.items():
                torch.testing.assert_close(others[name], weight, atol=2e-5, rtol=1e-4, msg=name)

    on_ranks(2, body)
