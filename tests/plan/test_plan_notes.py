"""What is no problem and worth knowing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.base.errors import Problem
from tandem.cli.show import show
from tandem.plan.plan import Plan
from tests.plan.folders import MODEL_CONFIG, write_model

Plans = Callable[..., Plan]


WIDE_ENGINE = (
    "execution.mode=hybrid",
    "execution.resource={actor: [1, 1], rollout: [1, 2]}",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
)


def test_advantages_take_no_device_whatever_is_given_them(plan_of: Plans) -> None:
    """The plan counts what the runtime reserves."""
    resource = "execution.resource={actor: [1, 4], rollout: [1, 2], actor_fwd: [1, 1], advantages: %s}"
    for entry in ("[1, 0]", "[2, 8]"):
        plan = plan_of("--fully-async", resource % entry)
        assert plan.problems == () and plan.devices == 7 and "advantages" not in plan.device_groups
        assert any("advantages" in note for note in plan.notes) == (entry == "[2, 8]")
    assert plan_of("--fully-async").runtime == "local"
    (problem,) = plan_of("--hybrid", "execution.resource={actor: [1, 0]}").problems
    assert problem.key == "execution.resource.actor" and "one device" in problem.reason


def test_a_reference_that_is_refreshed_each_step_is_told(plan_of: Plans) -> None:
    def notes(*words: str) -> list[str]:
        return [note for note in plan_of("--use-kl-loss", *words).notes if "update_interval is 1" in note]

    assert len(notes("actor_rollout_ref.ref.update_interval=1")) == 1
    assert notes("actor_rollout_ref.ref.update_interval=2") == notes() == []


def test_a_rank_above_the_smaller_side_of_a_matrix_is_told(place: Path, plan_of: Plans) -> None:
    header = {"model.layers.0.q_proj.weight": {"dtype": "U8", "shape": [8, 16], "data_offsets": [0, 128]}}
    text = json.dumps(header).encode()
    write_model(place / "narrow", **{**MODEL_CONFIG, "num_hidden_layers": 1})
    (place / "narrow" / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(128))
    for rank, told in ((8, False), (9, True)):
        words = (f"actor_rollout_ref.model.path={place / 'narrow'}", f"actor_rollout_ref.model.lora_rank={rank}")
        notes = [note for note in plan_of(*words).notes if "smaller side" in note]
        assert len(notes) == told and all("model.layers.0.q_proj (8 x 16)" in note for note in notes)


def test_what_lacks_a_package_is_said_to_be_not_here_and_what_comes_later_not_yet(
    plan_of: Plans, capsys: pytest.CaptureFixture[str]
) -> None:
    show(plan_of(*WIDE_ENGINE))
    assert "not yet: actor_rollout_ref.rollout.tensor_model_parallel_size = 2" in capsys.readouterr().out
    plan = plan_of("execution.mode=hybrid")
    lacking = Problem("actor_rollout_ref.rollout.name", "vllm", "needs the package vllm", "Install it")
    show(replace(plan, later=(lacking,)))
    out = capsys.readouterr().out
    assert "not here: actor_rollout_ref.rollout.name = 'vllm'" in out and "not yet" not in out
