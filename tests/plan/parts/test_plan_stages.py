"""Stages of plug-ins in a plan: where they come, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.base.errors import Problem
from tandem.plan.plan import Plan
from tandem.stages.registry import STAGES

Plans = Callable[..., Plan]
MODULE = """
from tandem import Stage, register_stage


class Plain(Stage):
    needed, given = ("responses",), ()

    def needs(self, step):
        return self.needed

    def gives(self, step):
        return self.given


@register_stage
class Judge(Plain):
    name, given = "judge", ("token_rewards",)

    def __init__(self, *, weight: float = 1.0):
        if weight < 0:
            raise ValueError("a weight below 0 punishes what is good")


@register_stage
class Whole(Judge):
    name, phase = "whole", "partition"


@register_stage
class Early(Judge):
    name, needed = "early", ("correction_of_nobody",)


@register_stage
class Circle(Judge):
    name, needed = "circle", ("responses", "advantages")


@register_stage
class Late(Plain):
    name, needed, given = "late", ("advantages",), ("loss_mask",)


@register_stage
class Again(Plain):
    name, given = "again", ("values", "truncated")


@register_stage
class Unread(Plain):
    name, given = "unread", ("reference_point",)


@register_stage
class Undeclared(Plain):
    name, given = "undeclared", ("token_rewards", "nobody_said")
"""
GAE = ("algorithm.adv_estimator=gae", "critic.enable=true")
RPP = ("algorithm.adv_estimator=reinforce_plus_plus",)


@pytest.fixture(autouse=True)
def plugin(place: Path) -> Iterator[None]:
    (place / "lab_of_stages.py").write_text(MODULE)
    before = dict(STAGES._entries)
    yield
    STAGES._entries.clear()
    STAGES._entries.update(before)
    sys.modules.pop("lab_of_stages", None)


def words(*stages: str) -> tuple[str, ...]:
    return ("plugins=[lab_of_stages]", f"algorithm.stages=[{', '.join(stages)}]")


@pytest.mark.parametrize("mode", ["colocate", "hybrid", "fully_async"])
@pytest.mark.parametrize("estimator", [GAE, RPP])
def test_a_stage_is_planned_before_the_advantages_that_read_it(
    plan_of: Plans, mode: str, estimator: tuple[str, ...]
) -> None:
    plan = plan_of(*words("judge"), *estimator, f"execution.mode={mode}")
    assert plan.problems == ()
    names = [stage.name for stage in plan.stages]
    assert names.index("judge") == names.index("advantages") - 1
    stages = {stage.name: stage for stage in plan.stages}
    assert "token_rewards" in stages["advantages"].needs
    assert stages["advantages"].gives == ("advantages", "returns")
    assert stages["judge"].role == ("judge" if mode == "fully_async" else "actor")
    assert stages["judge"].phase == "sub_batch"


def test_a_module_that_is_only_imported_changes_no_step(plan_of: Plans) -> None:
    assert [s.name for s in plan_of("plugins=[lab_of_stages]", *RPP).stages] == [s.name for s in plan_of(*RPP).stages]


ESTIMATORS_OF_SAMPLES = ["grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"]


@pytest.mark.parametrize("estimator", ESTIMATORS_OF_SAMPLES)
def test_an_estimator_that_takes_one_reward_per_sample_is_refused(plan_of: Plans, estimator: str) -> None:
    (problem,) = plan_of(*words("judge"), f"algorithm.adv_estimator={estimator}").problems
    assert problem.key == "algorithm.stages[0]" and problem.value == "judge"
    assert f"{estimator} adds them up to one reward per sample" in problem.reason
    assert (
        "gae or" in problem.remedy and "reinforce_plus_plus" in problem.remedy and "token_level=True" in problem.remedy
    )


@pytest.mark.parametrize(
    ("stages", "further", "key", "reason", "remedy"),
    [
        (["jugde"], RPP, "algorithm.stages[0]", "unknown stage", "'judge'"),
        (["judge", "old"], RPP, "algorithm.stages[1]", "it can't be asked for", "Remove this entry"),
        (["judge", "judge"], RPP, "algorithm.stages[1]", "named twice", "Keep one"),
        (["{type: judge, wieght: 1.0}"], RPP, "algorithm.stages[0].wieght", "no parameter", "'weight'"),
        (["{type: judge, weight: high}"], RPP, "algorithm.stages[0].weight", "a text where a number", "1.0"),
        (["{type: judge, weight: -1.0}"], RPP, "algorithm.stages[0]", "punishes what is good", "Correct"),
        (["early"], RPP, "algorithm.stages[0]", "'correction_of_nobody', which no stage gives", ""),
        (["circle"], RPP, "algorithm.stages[0]", "'advantages', which advantages gives after it", "'partition'"),
        (["again"], GAE, "algorithm.stages[0]", "'values', which values gives already", "never changed"),
        (["unread"], RPP, "algorithm.stages[0]", "nothing reads what it gives (reference_point)", "Remove it"),
        (["undeclared"], RPP, "algorithm.stages[0]", "'nobody_said', which nobody declared", "declare_column"),
        (["judge", "whole"], RPP, "algorithm.stages[1]", "'token_rewards', which judge gives already", ""),
        (
            ["judge"],
            (*RPP, "algorithm.filter_groups.enable=true"),
            "algorithm.filter_groups.enable",
            "before judge has told their tokens apart",
            "Write false",
        ),
        (
            ["whole"],
            (
                "algorithm.adv_estimator=optimal_token_baseline",
                "algorithm.old_logprobs=recompute",
                "execution={mode: hybrid, num_iters_per_train_update: 2, train_pipelining: accumulate}",
            ),
            "execution.train_pipelining",
            "algorithm.stages: whole looks at the whole partition",
            "Write off",
        ),
    ],
)
def test_what_is_refused(
    problems_of: Callable[..., list[Problem]],
    stages: list[str],
    further: tuple[str, ...],
    key: str,
    reason: str,
    remedy: str,
) -> None:
    problems = problems_of(*words(*stages), *further)
    found = [problem for problem in problems if problem.key == key and reason in problem.reason]
    assert found and remedy in found[0].remedy, [str(problem) for problem in problems]


def test_a_stage_of_a_part_of_the_partition_may_be_pipelined(plan_of: Plans) -> None:
    pipelined = "execution={mode: hybrid, num_iters_per_train_update: 2, train_pipelining: accumulate}"
    plan = plan_of(*words("judge"), "algorithm.adv_estimator=optimal_token_baseline", pipelined)
    assert plan.problems == ()


def test_preferences_have_no_place_for_one(plan_of: Plans) -> None:
    problems = plan_of(*words("judge"), "algorithm.policy_loss.type=dpo", "data.answer_key=null").problems
    assert any(problem.key == "algorithm.stages" for problem in problems)
