"""What is asked of routers is refused by name where a model has none that are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.plan.plan import Plan
from tests.plan.folders import MODEL_CONFIG, write_model

Plans = Callable[..., Plan]

ACTOR = "actor_rollout_ref.actor"
BALANCE, REPLAY = f"{ACTOR}.router_aux_loss_coef", f"{ACTOR}.router_replay"
ROUTES = {"prompt_routes", "routes"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def of_family(place: Path, family: str, **more: int) -> None:
    write_model(place / "model", **{**MODEL_CONFIG, **more, "model_type": family})


def test_a_mixture_of_experts_is_balanced_and_replayed(place: Path, plan_of: Plans) -> None:
    of_family(place, "qwen3_moe", **EXPERTS)
    assert plan_of(f"{BALANCE}=0.01").problems == ()
    plan = plan_of(f"{REPLAY}=true", "algorithm.kl.in=loss", "algorithm.old_logprobs=recompute")
    assert plan.problems == ()
    stages = {stage.name: stage for stage in plan.stages}
    assert {*stages["rollout"].gives} >= ROUTES
    assert all({*stages[name].needs} >= ROUTES for name in ("old", "train"))
    assert not ROUTES & {*stages["ref"].needs}  # other weights choose for themselves
    assert not any(ROUTES & {*stage.gives, *stage.needs} for stage in plan_of().stages)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_engines_that_record_nothing_are_refused_by_name(place: Path, plan_of: Plans, name: str) -> None:
    of_family(place, "qwen3_moe", **EXPERTS)
    words = (f"actor_rollout_ref.rollout.name={name}", "execution.mode=hybrid")
    problems = [problem for problem in plan_of(f"{REPLAY}=true", *words).problems if problem.key == REPLAY]
    assert [f"the engine {name} does not tell" in problem.reason for problem in problems] == [True]
    swap = f"actor_rollout_ref.rollout.swap={{step: 3, name: {name}}}"
    later = [p for p in plan_of(f"{REPLAY}=true", "execution.mode=hybrid", swap).problems if p.key == REPLAY]
    assert [f"the engine {name} does not tell" in problem.reason for problem in later] == [True]


@pytest.mark.parametrize("asked", [f"{BALANCE}=0.01", f"{REPLAY}=true"])
@pytest.mark.parametrize(
    ("family", "more", "words", "reason", "remedy"),
    [
        ("llama", {}, (), "the family llama has no router", "Leave it out"),
        ("phimoe", {"num_local_experts": 4}, (), "the family phimoe has a router that is not known", "Leave it out"),
        (
            "qwen3_moe",
            EXPERTS,
            ("execution.resource={actor: [1, 2]}", f"{ACTOR}.ulysses_sequence_parallel_size=2"),
            "gives a router parts of rows",
            "ulysses_sequence_parallel_size: 1",
        ),
    ],
)
def test_routers_that_are_not_known_or_not_whole_are_refused(
    place: Path,
    plan_of: Plans,
    asked: str,
    family: str,
    more: dict[str, int],
    words: tuple[str, ...],
    reason: str,
    remedy: str,
) -> None:
    of_family(place, family, **more)
    (problem,) = plan_of(asked, *words).problems
    assert problem.key == asked.partition("=")[0]
    assert reason in problem.reason and remedy in problem.remedy
    assert plan_of(*words).problems == ()
