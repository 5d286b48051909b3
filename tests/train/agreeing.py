"""Two engines that must give the same: one alone, and one whose model or rows are spread over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.train.objective import LossSum, PolicyObjective
from tandem.train.protocol import TopTokens

WANTED = ("logprobs", "entropies", "sum_pi_squared", TopTokens(3, 20))
OBJECTIVE = PolicyObjective(kl_coef=0.1, entropy_coef=0.01)


def agree(
    one: Any, many: Any, whole: Any, rows: list[int], objective: PolicyObjective = OBJECTIVE
) -> tuple[LossSum, LossSum]:
    """What both engines compute, and a step of both; ``many`` gets the ``rows`` of the batch. Gives their losses."""
    mine = whole[rows]
    expected, found = one.forward(whole, WANTED), many.forward(mine, WANTED)
    for name, values in expected.items():
        wanted = values.take(torch.tensor(rows)).values
        torch.testing.assert_close(found[name].values, wanted, atol=2e-5, rtol=1e-4)
    loss, split_loss = (engine.forward_backward(part, objective) for engine, part in ((one, whole), (many, mine)))
    torch.testing.assert_close(split_loss.loss, loss.loss, atol=1e-4, rtol=1e-5)
    gradients = {name: weight.grad for name, weight in one.model.named_parameters()}
    for name, weight in many.model.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(weight.grad.full_tensor(), gradients[name], atol=1e-5, rtol=1e-4, msg=name)
    step, split_step = (engine.optim_step(objective.denominator(whole)) for engine in (one, many))
    assert split_step.applied and split_step.grad_norm == pytest.approx(step.grad_norm, rel=1e-5)
    same(one, many)
    return loss, split_loss


def same(one: Any, many: Any) -> None:
    expected, found = dict(one.export()), dict(many.export())
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=1e-4)
