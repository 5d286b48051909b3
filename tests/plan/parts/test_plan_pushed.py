"""What a push carries follows from what is trained and from what the engine takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.base.registry import Registry
from tandem.plan.plan import Plan
from tandem.rollout import registry
from tandem.rollout.capabilities import EngineCapabilities

Plans = Callable[..., Plan]
HYBRID, LORA = "execution.mode=hybrid", "actor_rollout_ref.model.lora_rank=4"


@pytest.fixture
def whole_only(monkeypatch: pytest.MonkeyPatch) -> str:
    """An engine that says nothing of adapters."""
    known: Registry[Callable[..., object]] = registry.engines  # type: ignore[assignment]
    monkeypatch.setattr(known, "_entries", dict(known._entries))
    known.register("whole_only", capabilities=EngineCapabilities(weights=("shared", "own")))(lambda model: model)
    return "actor_rollout_ref.rollout.name=whole_only"


def test_adapters_go_to_an_engine_that_takes_them(plan_of: Plans, whole_only: str) -> None:
    assert plan_of(LORA).pushed == plan_of().pushed == "nothing"
    assert plan_of(HYBRID).pushed == "merged"
    assert plan_of(HYBRID, LORA).pushed == "adapter"
    assert plan_of(HYBRID, LORA, "execution.weight_sync.lora=merged").pushed == "merged"
    assert plan_of(HYBRID, LORA, whole_only).pushed == "merged"
    (problem,) = plan_of(HYBRID, LORA, whole_only, "execution.weight_sync.lora=adapter").problems
    assert problem.key == "execution.weight_sync.lora"
    assert "takes whole weights only" in problem.reason
