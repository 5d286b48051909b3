"""What each device of a run holds is what the plan says it holds: which parts, and how many bytes at the peak."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.plan.memory import MemoryPlan
from tandem.plan.plan import compile_plan
from tests.devices import sim
from tests.devices.test_role_devices import KL, ON_SIM
from tests.e2e.seven import Run, train, training_engine


def measured(task: Path, folder: Path, *words: str) -> tuple[Run, tuple[MemoryPlan, ...], list[int]]:
    """A run, what was planned for each device, and the peak of what it added to each."""
    plans = compile_plan(load_words([str(task), *ON_SIM, *words], Config)).memory
    gc.collect()
    accounts = sim.accounts[: len(plans)]
    before = [account.allocated for account in accounts]
    for account in accounts:
        account.reset_peak()
    run = train(task, *ON_SIM, *words, f"trainer.output_dir={folder}")
    return run, plans, [account.peak - there for account, there in zip(accounts, before, strict=True)]


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        (("execution.mode=colocate",), ["shared"]),
        (("execution.mode=hybrid", "execution.max_staleness=0"), ["actor", "rollout"]),
        (("execution.mode=fully_async", KL), ["actor", "rollout", "reference", "actor_fwd"]),
    ],
    ids=["colocate", "hybrid", "fully_async"],
)
def test_the_peak_of_each_device_is_within_half_of_what_was_planned(
    task: Path, tmp_path: Path, words: tuple[str, ...], groups: list[str]
) -> None:
    _, plans, peaks = measured(task, tmp_path / "run", *words)
    assert [plan.group for plan in plans] == groups
    for plan, peak in zip(plans, peaks, strict=True):
        assert peak / 1.5 <= plan.total <= 1.5 * peak, (plan.group, peak, plan.parts)


def test_two_devices_hold_the_parts_that_the_plan_says(task: Path, tmp_path: Path) -> None:
    """Weights, gradients and moments on the actor's, weights and keys and values on the engine's."""
    run, plans, _ = measured(task, tmp_path / "run", "execution.mode=hybrid")
    actor, rollout = (plan.parts for plan in plans)
    assert {"actor weights", "actor gradients", "actor optimizer"} <= actor.keys()
    assert {"rollout weights", "rollout KV cache"} <= rollout.keys()
    assert not any(part.startswith("rollout") for part in actor)
    engine = training_engine(run.session)
    moments = [value for state in engine._updater.optimizer.state.values() for value in state.values()]
    on_actor = [*engine.model.parameters(), *(m for m in moments if isinstance(m, torch.Tensor) and m.dim())]
    assert {str(tensor.device) for tensor in on_actor} == {"sim:0"}
    session: Any = run.session
    serving = session.composite.engine.engines["rollout-0"]
    caches = [store for pair in serving._spare.answers._layers.values() for store in pair]
    assert {str(tensor.device) for tensor in [*serving._model.parameters(), *caches]} == {"sim:1"}
