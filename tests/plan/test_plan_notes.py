"""What is no problem and worth knowing."""

from __future__ import annotations

from collections.abc import Callable

from tandem.plan.plan import Plan

Plans = Callable[..., Plan]


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
