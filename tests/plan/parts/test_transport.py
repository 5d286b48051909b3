"""How weights travel follows from where the roles are, unless it is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.base.errors import ConfigError
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.plan.parts.transport import KEY
from tandem.plan.plan import Plan, compile_plan

Plans = Callable[..., Plan]
BOTH = "execution.resource={actor: [2, 2], rollout: [2, 2]}"
SEVERAL = "execution.resource={actor: [2, 2], rollout: [1, 2]}"


@pytest.mark.parametrize(
    ("words", "transport"),
    [
        ((), "shared_memory"),
        (("execution.mode=hybrid",), "shared_memory"),
        (("execution.mode=hybrid", SEVERAL), "collective"),
        (("execution.mode=fully_async", SEVERAL), "collective"),
        ((BOTH,), "shared_memory"),
        (("execution.mode=hybrid", SEVERAL, "execution.weight_sync.transport=shared_memory"), "shared_memory"),
        (("execution.mode=hybrid", "execution.weight_sync.transport=collective"), "collective"),
    ],
)
def test_it_is_a_broadcast_where_a_role_has_several_nodes(
    plan_of: Plans, words: tuple[str, ...], transport: str
) -> None:
    plan = plan_of(*words)
    assert plan.transport == transport
    assert plan.problems == ()


@pytest.mark.parametrize(
    ("words", "reason", "remedy"),
    [
        (("{t}=collective",), "generates with the actor's own parameters", "execution.mode: hybrid"),
        (("{t}=shared_memory",), "generates with the actor's own parameters", "Leave it out"),
        (
            ("{t}=collective", BOTH),
            "the same devices",
            "shared_memory",
        ),
        (("execution.mode=hybrid", "{t}=collective", "runtime.threads=true"), "nobody to broadcast to", "false"),
    ],
)
def test_one_that_can_not_act_is_refused(plan_of: Plans, words: tuple[str, ...], reason: str, remedy: str) -> None:
    (problem,) = plan_of(*(word.format(t=KEY) if word.startswith("{t}") else word for word in words)).problems
    assert problem.key == KEY
    assert reason in problem.reason and remedy in problem.remedy


def test_in_a_loop_of_ones_own_weights_are_not_broadcast() -> None:
    config = load_words(["execution.mode=hybrid", f"{KEY}=collective", "actor_rollout_ref.model.path=x"], Config)
    found = [problem for problem in compile_plan(config, own_loop=True).problems if problem.key == KEY]
    assert [problem.remedy for problem in found] == ["Leave it out"]


@pytest.mark.parametrize(
    ("value", "reason", "remedy"),
    [
        ("ipc", "sees its own GPU alone", "Write shared_memory, or collective"),
        ("checkpoint_engine", "the package checkpoint-engine is not used", "Write collective"),
        ("checkpoint-engine", "the package checkpoint-engine is not used", "Write collective"),
        ("colective", "not one of the choices", "Did you mean 'collective'?"),
    ],
)
def test_one_that_is_not_there_is_refused_with_why_and_what_to_write_instead(
    value: str, reason: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_words(["execution.mode=hybrid", f"{KEY}={value}", "actor_rollout_ref.model.path=x"], Config)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == (KEY, value)
    assert reason in problem.reason and remedy in problem.remedy
