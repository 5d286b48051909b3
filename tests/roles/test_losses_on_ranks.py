"""Every loss that may be cut: two ranks in processes of their own train as one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tandem.algorithms.reduce import Aggregation
from tandem.roles.train_rank import TrainRank
from tandem.train.objective import PolicyObjective
from tests.algorithms.entries import PARAMETERS, SPLITTABLE
from tests.roles.rank_processes import group_of
from tests.train.conftest import GPT2, build_batch, build_engine


def test_b17_every_loss_gives_two_ranks_the_loss_and_gradient_of_one(tmp_path: Path) -> None:
    """float64, so that what is left is the order of sums; all losses in turn, each from where the last one led."""
    batch = build_batch([7, 2, 30, 4, 9, 1, 12, 5, 3], group_size=3)
    noise = torch.randn(73, generator=torch.Generator().manual_seed(1))
    old = batch.ragged("old_logprobs")
    batch.batch["rollout_logprobs"] = old.like(old.values + 0.2 * noise)
    batch.batch["tis_weights"] = old.like(noise.exp())
    batch.batch["loss_mask"] = old.like(noise > -1.5)
    double = partial(build_engine, shape=GPT2, double=True, max_tokens=40)
    modes = list(Aggregation)
    with (
        group_of(0, lambda mesh: double(mesh=mesh), tmp_path) as one,
        group_of(2, lambda mesh: double(mesh=mesh), tmp_path / "two", balance=True) as two,
    ):
        for number, name in enumerate(SPLITTABLE):
            mode = modes[number % len(modes)]
            objective = PolicyObjective(name, PARAMETERS.get(name, {}), mode, norm=30.0, kl_coef=0.05)
            seen = []
            for group in (one, two):
                total = group.forward_backward(batch, objective)
                result = group.call(TrainRank.optim_step, objective.denominator(batch))
                metrics = {key: metric.mean for key, metric in total.metrics.items()}
                seen.append((float(total.loss), result.grad_norm, metrics))
            assert seen[1][:2] == pytest.approx(seen[0][:2], rel=1e-6), name
            assert seen[1][2] == pytest.approx(seen[0][2], rel=1e-6, abs=1e-9), name
        mine = dict(two.export())
        for name, tensor in one.export():
            torch.testing.assert_close(mine[name], tensor, atol=1e-6, rtol=1e-6)
