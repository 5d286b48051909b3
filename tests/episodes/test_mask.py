"""What the policy loss learns from a trajectory of several turns: the tokens that were sampled, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.base.environments import ROW
from tandem.columns.proto import DataProto
from tandem.episodes.built_in import BUILT_IN
from tandem.train.objective import PolicyObjective
from tests.algorithms.entries import LOSSES, PARAMETERS
from tests.episodes.test_groups import HERMES, adds, made_of, playing, prompt
from tests.episodes.test_program import played

PLAYS = str(Path(__file__).parent / "plays.py")
TEXT = "what is 1+1"
TYPES = ("tool_calls", "program keeps", "program trims", "verifiers", "openenv", "talk", "tokens", "branching")

HERE = Path(__file__).parent
SUM = {"answer": "2", "info": {"hint": 12, "fate": "well"}, "example_id": 0}
OTHERS: dict[str, Any] = {
    "verifiers": {
        "parameters": {"env": str(HERE / "sums_env.py")},
        "sampling": {"temperature": 1.0, "top_p": 1.0},
    },
    "openenv": {"parameters": {"env": f"{HERE / 'openenv_games.py'}:Game"}},
}


def says(text: str, seed: int) -> str:
    return "17" if "is it" in text else "12"


def trajectories(type_: str) -> DataProto:
    """Two episodes of several turns, with what others said in between."""
    if type_ == "tool_calls":
        with playing(type_, adds(HERMES), tools=True) as (groups, engine, made):
            (group,) = made_of(groups, engine, [prompt(made, TEXT, tools=True)])
    elif type_.startswith("program"):
        group, _, _ = played(type_.partition(" ")[2], " is it 12 \n", n=2)
    elif type_ in ("verifiers", "openenv"):
        pytest.importorskip(type_)
        row = {"reset": {"wanted": "17"}} if type_ == "openenv" else {ROW: SUM}  # what the second answer is
        with playing(type_, says, past="edited", max_tokens=2000, **OTHERS[type_]) as (groups, engine, made):
            (group,) = made_of(groups, engine, [prompt(made, TEXT, **row)])
    elif type_ == "branching":
        with playing(type_, says, file=PLAYS, branches=3) as (groups, engine, made):
            (group,) = made_of(groups, engine, [prompt(made, TEXT)])
    else:
        with playing(type_, lambda text, seed: "is", file=PLAYS, parameters={"turns": 3}) as (groups, engine, made):
            (group,) = made_of(groups, engine, [prompt(made, TEXT)])
    return group.batch


def test_every_built_in_episode_is_among_those_that_are_looked_at() -> None:
    assert {*BUILT_IN} <= {type_.split()[0] for type_ in TYPES}


def gradient(batch: DataProto, logprobs: torch.Tensor, loss: str) -> torch.Tensor:
    """That of the summed loss by ``logprobs`` (B, L), at the first update of a step."""
    generator = torch.Generator().manual_seed(0)
    columns = {
        "response_mask": batch.padded("response_mask", False).bool(),
        "rollout_logprobs": batch.padded("rollout_logprobs", 0.0),
        "advantages": 1.0 + torch.rand(logprobs.shape, generator=generator),
    }
    logprobs = logprobs.clone().requires_grad_()
    total = PolicyObjective(policy_loss=loss, parameters=PARAMETERS.get(loss, {})).numerator(columns, logprobs, None)
    (found,) = torch.autograd.grad(total.loss, logprobs)
    return found


@pytest.mark.parametrize("type_", TYPES)
def test_the_loss_has_no_gradient_by_a_token_that_was_not_sampled(type_: str) -> None:
    batch = trajectories(type_)
    mask, logprobs = batch.padded("response_mask", False).bool(), batch.padded("rollout_logprobs", 0.0)
    inside = batch.ragged("response_mask").values
    assert bool(inside.any()) and not bool(inside.all())
    for loss in LOSSES:
        found = gradient(batch, logprobs, loss)
        assert bool((found[~mask] == 0).all()), loss
        for other in (-30.0, -0.5):  # whatever the policy thinks of what others said
            assert torch.equal(gradient(batch, torch.where(mask, logprobs, other), loss), found), loss
    assert bool((gradient(batch, logprobs, "ppo_clip")[mask] != 0).all())
