"""What a rollout engine declares is held against what the config asks of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import Problem
from tandem.plan.plan import Plan
from tandem.rollout import interpreter, registry
from tandem.rollout.capabilities import EngineCapabilities
from tandem.rollout.registry import register_engine

Plans = Callable[..., Plan]
Problems = Callable[..., list[Problem]]
Declare = Callable[..., str]

ROLLOUT = "actor_rollout_ref.rollout"
HYBRID, RAY = "execution.mode=hybrid", "runtime.name=ray"
FULL: dict[str, Any] = {
    "weights": ("shared", "own"),
    "devices": ("cpu", "cuda"),
    "in_flight": ("abort", "keep"),
    "keep_kv": ("old", "recompute"),
    "logprobs": ("sampled", "full"),
    "seeds": True,
    "exact": True,
}


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Iterator[Declare]:
    """Register an engine that can do everything but what is given; the word that names it."""
    monkeypatch.setattr(registry.engines, "_entries", dict(registry.engines._entries))

    def declared(**capabilities: Any) -> str:
        registry.engines._entries.pop("limited", None)

        @register_engine("limited", capabilities=EngineCapabilities(**{**FULL, **capabilities}))
        def limited(model: object, *, max_num_batched_tokens: int = 1) -> Any:
            raise AssertionError

        return f"{ROLLOUT}.name=limited"

    return declared


def test_an_engine_that_can_do_all_is_planned_as_hf_is(declare: Declare, problems_of: Problems) -> None:
    name = declare()
    asked = (f"{ROLLOUT}.on_weight_update=keep", f"{ROLLOUT}.keep_kv=recompute", "trainer.exact=true")
    assert problems_of(name) == problems_of(name, HYBRID, *asked) == []
    assert problems_of(name, HYBRID, f"{ROLLOUT}.on_weight_update=abort", "runtime.device=cuda") == []


# capabilities | words | key | part of the reason | part of the remedy
REFUSED: list[tuple[dict[str, Any], tuple[str, ...], str, str, str]] = [
    ({"weights": ("shared",)}, (HYBRID,), f"{ROLLOUT}.name", "trainer's own parameters only", "weights=('own',)"),
    ({"weights": ("shared",)}, ("execution.mode=fully_async",), f"{ROLLOUT}.name", "in fully_async", "colocate"),
    ({"weights": ("shared",)}, (RAY,), f"{ROLLOUT}.name", "in colocate on Ray", "one device a role"),
    ({"in_flight": ()}, (HYBRID, f"{ROLLOUT}.on_weight_update=abort"), f"{ROLLOUT}.on_weight_update", "end", "wait"),
    (
        {"in_flight": ("abort",)},
        (HYBRID, f"{ROLLOUT}.on_weight_update=keep"),
        f"{ROLLOUT}.on_weight_update",
        "go on with a running generation",
        "Write wait or abort; or declare in_flight=('keep',)",
    ),
    (
        {"keep_kv": ("old",)},
        (HYBRID, f"{ROLLOUT}.on_weight_update=keep", f"{ROLLOUT}.keep_kv=recompute"),
        f"{ROLLOUT}.keep_kv",
        "compute keys and values again",
        "Write old",
    ),
    (
        {"keep_kv": ("recompute",)},
        (HYBRID, f"{ROLLOUT}.on_weight_update=keep"),
        f"{ROLLOUT}.keep_kv",
        "keep old keys",
        "Write recompute",
    ),
    (
        {"lowest_temperature": 0.5},
        (f"{ROLLOUT}.temperature=0.3",),
        f"{ROLLOUT}.temperature",
        "draws at 0.5 or above",
        "Write 0.5 or more",
    ),
    (
        {"lowest_temperature": 0.5},
        ("evaluation.temperature=0.3",),
        "evaluation.temperature",
        "draws at 0.5 or above",
        "or 0 for greedy answers",
    ),
    ({"devices": ("cpu",)}, ("runtime.device=cuda",), "runtime.device", "on cpu only", "Write cpu"),
    ({"devices": ("cuda",)}, ("runtime.device=cpu",), "runtime.device", "on cuda only", "Write cuda"),
    ({"exact": False}, ("trainer.exact=true",), "trainer.exact", "same bits", "exact=True"),
    (
        {"logprobs": ("sampled",)},
        (f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.logprobs_of=full"),
        f"{ROLLOUT}.logprobs_of",
        "before top_p and top_k",
        "Write sampled",
    ),
    (
        {"logprobs": ("raw",)},
        (f"{ROLLOUT}.temperature=0.7",),
        f"{ROLLOUT}.logprobs_of",
        "drawn from",
        "temperature: 1.0",
    ),
    ({"logprobs": ("raw",)}, (f"{ROLLOUT}.top_k=5",), f"{ROLLOUT}.logprobs_of", "drawn from", "Write full"),
    ({"logprobs": ()}, ("--use-tis",), "algorithm.use_tis", "gives no rollout log-probs", "Turn it off"),
]


@pytest.mark.parametrize(("lacking", "words", "key", "reason", "remedy"), REFUSED)
def test_what_an_engine_does_not_declare_is_refused_with_what_to_write(
    declare: Declare,
    problems_of: Problems,
    lacking: dict[str, Any],
    words: tuple[str, ...],
    key: str,
    reason: str,
    remedy: str,
) -> None:
    (problem,) = problems_of(declare(**lacking), *words)
    assert problem.key == key
    assert reason in problem.reason and remedy in problem.remedy
    assert "limited" in problem.reason or (key == f"{ROLLOUT}.name" and problem.value == "limited")


def test_equal_distributions_are_not_told_apart(declare: Declare, problems_of: Problems) -> None:
    name = declare(logprobs=("raw",))
    assert problems_of(name) == []
    assert problems_of(name, f"{ROLLOUT}.logprobs_of=full", f"{ROLLOUT}.top_k=5") == []


def test_adapters_are_sent_to_engines_that_take_them(declare: Declare, plan_of: Plans) -> None:
    lora = "actor_rollout_ref.model.lora_rank=4"
    assert plan_of(declare(adapters=True), HYBRID, lora).pushed == "adapter"


@pytest.mark.parametrize(
    ("weights", "words", "pushed"),
    [
        (("shared", "own"), (), "nothing"),
        (("shared",), (), "nothing"),
        (("own",), (), "merged"),
        (("shared", "own"), (HYBRID,), "merged"),
        (("shared", "own"), (RAY,), "merged"),
    ],
)
def test_an_engine_shares_the_actors_parameters_where_it_can(
    declare: Declare, plan_of: Plans, weights: tuple[str, ...], words: tuple[str, ...], pushed: str
) -> None:
    plan = plan_of(declare(weights=weights), *words)
    assert not plan.problems
    assert plan.pushed == pushed


def test_an_interpreter_is_for_an_engine_in_a_process_of_its_own(
    declare: Declare, problems_of: Problems, place: Path
) -> None:
    program = place / "python"
    program.write_text("#!/bin/sh\n")
    word, name = f"{ROLLOUT}.python={program}", declare()
    (problem,) = problems_of(name, HYBRID, word)
    assert (problem.key, problem.reason) == (f"{ROLLOUT}.python", "there is no such program")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    assert problems_of(name, HYBRID, word) == []
    for words, reason in (((), "trainer's process"), ((HYBRID, "runtime.threads=true"), "this process")):
        (problem,) = problems_of(name, word, *words)
        assert problem.key == f"{ROLLOUT}.python" and reason in problem.reason
    assert problems_of(name, word, HYBRID, RAY) == []


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (None, "it is no Python of version 3.11 or later"),
        ("exit 0", "it answered ''"),
        ("sleep 60", "no answer within 0.2 s"),
        ('exec {python} -S "$@"', "needs the package torch, which is not installed there"),
    ],
)
def test_an_interpreter_that_an_engine_can_not_live_in_is_refused_by_the_plan(
    declare: Declare,
    problems_of: Problems,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: str | None,
    reason: str,
) -> None:
    program = Path("/bin/ls") if lines is None else place / "python"
    if lines is not None:
        program.write_text(f"#!/bin/sh\n{lines.format(python=sys.executable)}\n")
        program.chmod(0o755)
    if "0.2" in reason:
        monkeypatch.setattr(interpreter, "ANSWER_S", 0.2)
    (problem,) = problems_of(declare(), HYBRID, f"{ROLLOUT}.python={program}")
    assert problem.key == f"{ROLLOUT}.python" and reason in problem.reason and problem.remedy


@pytest.mark.parametrize(
    ("package", "versions", "reason"),
    [
        ("no-such-package", ">=1", "needs the package no-such-package>=1, which is not installed there"),
        ("torch", "<1", "needs the package torch<1, and "),
        ("torch", ">=1", None),
    ],
)
def test_an_interpreter_without_the_engines_package_is_refused_by_the_plan(
    declare: Declare, problems_of: Problems, package: str, versions: str, reason: str | None
) -> None:
    found = problems_of(declare(package=package, versions=versions), HYBRID, f"{ROLLOUT}.python={sys.executable}")
    assert [problem.key for problem in found] == ([] if reason is None else [f"{ROLLOUT}.python"])
    assert all(reason is not None and reason in problem.reason for problem in found)


def test_a_package_that_is_missing_can_be_planned_and_not_be_run(declare: Declare, plan_of: Plans) -> None:
    name = declare(package="no-such-package", versions=">=1")
    plan = plan_of(name, HYBRID)
    assert not plan.problems and not plan.runs
    (later,) = plan.later
    assert later.key == f"{ROLLOUT}.name" and "no-such-package>=1" in later.reason and "pip install" in later.remedy


def test_an_engine_on_several_devices_can_be_planned_and_not_be_run(declare: Declare, plan_of: Plans) -> None:
    words = (HYBRID, "execution.resource={rollout: [1, 2]}", f"{ROLLOUT}.tensor_model_parallel_size=2")
    plan = plan_of(declare(tensor_parallel=True), *words)
    assert not plan.problems and not plan.runs
    (later,) = plan.later
    assert later.key == f"{ROLLOUT}.tensor_model_parallel_size" and "one device" in later.reason
    other = declare()  # it has nothing of the kind, so that there are two of it
    assert plan_of(other, *words, f"{ROLLOUT}.strict=false").runs


@pytest.mark.parametrize("name", ["hf", "vllm"])
def test_what_only_another_engine_has_is_refused_unless_the_config_is_not_strict(plan_of: Plans, name: str) -> None:
    """The switch back is one line: what that engine has beside is named, with the engines that have it."""
    words = (HYBRID, f"{ROLLOUT}.name={name}", f"{ROLLOUT}.gpu_memory_utilization=0.5")
    strict, lenient = plan_of(*words), plan_of(*words, f"{ROLLOUT}.strict=false")
    of_it = [problem for problem in strict.problems if problem.key == f"{ROLLOUT}.gpu_memory_utilization"]
    noted = [note for note in lenient.notes if note.startswith(f"{ROLLOUT}.gpu_memory_utilization is not used")]
    assert lenient.problems == ()
    assert bool(of_it) == bool(noted) == (name == "hf")
    for problem in of_it:
        assert "hf has nothing of the kind (sglang and vllm have)" in problem.reason
        assert f"{ROLLOUT}.strict: false" in problem.remedy


def test_what_the_engine_of_a_later_swap_has_is_read(plan_of: Plans) -> None:
    swap = f"{ROLLOUT}.swap={{step: 1, name: vllm}}"
    plan = plan_of(HYBRID, swap, f"{ROLLOUT}.gpu_memory_utilization=0.5")
    assert not [problem for problem in plan.problems if "gpu_memory" in problem.key]


TWO_ENGINES = "execution.resource={rollout: [1, 2]}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), False),
        ((TWO_ENGINES,), True),
        ((TWO_ENGINES, "trainer.exact=true"), False),
        ((TWO_ENGINES, "execution.train_pipelining=step"), False),
        ((TWO_ENGINES, f"{ROLLOUT}.dispatch=in_order"), False),
        ((f"{ROLLOUT}.dispatch=longest_first",), True),
    ],
)
def test_long_answers_are_begun_first_where_several_engines_share_them(
    plan_of: Plans, words: tuple[str, ...], expected: bool
) -> None:
    assert plan_of(HYBRID, *words).longest_first == expected


def test_an_order_that_follows_from_what_was_generated_is_not_exact(plan_of: Plans) -> None:
    problems = plan_of(HYBRID, "trainer.exact=true", f"{ROLLOUT}.dispatch=longest_first").problems
    assert [problem.key for problem in problems] == [f"{ROLLOUT}.dispatch"]
    assert "in which they are drawn" in problems[0].reason


def test_what_an_engine_leaves_aside_is_told(declare: Declare, plan_of: Plans) -> None:
    name = declare(weights=("own",), seeds=False)
    own = (f"{ROLLOUT}.max_num_batched_tokens=999", f"{ROLLOUT}.gpu_memory_utilization=0.5")
    notes = plan_of(name, *own, f"{ROLLOUT}.strict=false").notes
    assert any("gpu_memory_utilization" in note and "limited has nothing of the kind" in note for note in notes)
    assert not any("max_num_batched_tokens" in note for note in notes)
    assert any("other samples" in note for note in notes)
    assert any("frees nothing" in note for note in notes)
    assert not any("limited" in note for note in plan_of(f"{ROLLOUT}.name=hf").notes)


def test_more_groups_than_needed_are_begun_by_an_engine_that_can_end_them(declare: Declare, plan_of: Plans) -> None:
    key, one = f"{ROLLOUT}.oversample", f"{ROLLOUT}.oversample=2"
    episode = f"{ROLLOUT}.episode={{type: tool_calls, tools: [python]}}"
    assert plan_of(one).problems == plan_of(HYBRID, one, f"{ROLLOUT}.name=vllm").problems == ()
    for words, reason, remedy in (
        (("trainer.exact=true",), "whichever are done first", "trainer.exact: false"),
        ((episode,), "(tool_calls) can't be ended from outside", "Write 0"),
        ((declare(),), "limited can't end a group", "declare cancel=True"),
    ):
        (found,) = [problem for problem in plan_of(one, *words).problems if problem.key == key]
        assert reason in found.reason and remedy in found.remedy
    assert plan_of(one, declare(cancel=True)).problems == ()
