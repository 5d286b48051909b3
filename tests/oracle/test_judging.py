"""The harness itself: a wrong answer must fail, also where a rule lets ours differ from the reference."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.oracle.test_oracle  # noqa: F401  (registers the adapters)
from tandem.base.errors import ContractError, TandemError
from tests.oracle.conftest import SAMPLE, oracle_path
from tests.oracle.oracle_correction import right_of_correction
from tests.oracle.oracle_file import Case, Inputs, decode, read_cases
from tests.oracle.oracle_loss import right_policy
from tests.oracle.oracle_verdict import (
    ADAPTERS,
    DIFFERENCES,
    Answer,
    Kind,
    NotBuiltError,
    Refused,
    judge,
    judge_outcome,
    mismatch,
    overlaid,
    restricted,
)
from tests.oracle.right_advantage import right_advantages
from tests.oracle.right_loss import right_aggregate

CASES = {case.id: case for case in read_cases(SAMPLE)}


def changed(case: Case, **expected: Any) -> Case:
    return replace(case, expected={**case.expected, **expected})


def given(case: Case, **inputs: Any) -> Case:
    return replace(case, inputs=Inputs({**case.inputs, **inputs}))


def answers_of(cases: list[Case]) -> Iterator[tuple[Case, Answer]]:
    """Our answers to the cases that ours gives one to."""
    for case in cases:
        try:
            yield case, ADAPTERS[case.section, case.fn](case)
        except TandemError:
            continue
        except ImportError:
            continue


def damaged(value: Any) -> Iterator[Any]:
    """The value with a fault: another number in one place, all doubled, all nothing, the reverse, another text."""
    if isinstance(value, str) or value is None:
        yield "something else"
        return
    if isinstance(value, Mapping) or (isinstance(value, list) and not all(isinstance(x, int | float) for x in value)):
        yield [*value][:-1] if value else [0]
        return
    tensor = torch.as_tensor(value)
    if tensor.numel() == 0:
        return
    if tensor.dtype == torch.bool:
        yield ~tensor
        return
    numbers = tensor.double().reshape(-1)
    size = float(numbers.abs().max())
    shift, hole = torch.zeros_like(numbers), torch.zeros_like(numbers)
    shift[0], hole[-1] = 1e-3 * max(1.0, size), math.nan
    for wrong in (numbers + shift, numbers + hole, *([numbers * 2, numbers * 0] if size > 1e-3 else [])):
        yield wrong.reshape(tensor.shape)


def faults(case: Case, answer: Answer) -> Iterator[tuple[str, Answer]]:
    """The answer with one of its results damaged at a time; of metrics one of them."""
    compared = answer.actual if case.refused else answer.expected or case.expected
    for name, value in answer.actual.items():
        if name not in compared:
            continue
        if not isinstance(value, Mapping):
            for wrong in damaged(value):
                yield name, replace(answer, actual={**answer.actual, name: wrong})
            continue
        for key in compared[name]:
            for wrong in damaged(value[key]):
                yield f"{name}.{key}", replace(answer, actual={**answer.actual, name: {**value, key: wrong}})


def test_the_sample_passes_or_differs() -> None:
    kinds = {case.id: judge(case) for case in CASES.values()}
    assert {verdict.kind for verdict in kinds.values()} <= {Kind.PASSED, Kind.DIFFERS, Kind.NOT_INSTALLED}
    assert kinds["advantage.rloo.h02"].kind is kinds["agg.agg_loss.h06"].kind is Kind.DIFFERS
    assert kinds["advantage.rloo.h01"].kind is Kind.PASSED


@pytest.mark.parametrize("rule", DIFFERENCES, ids=lambda rule: f"{rule.section}: {rule.reason[:60]}")
def test_every_rule_has_a_sample_case(rule: Any) -> None:
    assert any(rule.covers(case) for case in CASES.values())


def test_the_page_of_differences_names_every_rule_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "differences.md").read_text("utf-8")
    first = page.partition("## ")[0]
    told = {line.split("|")[2].strip() for line in first.splitlines() if line.startswith("|")}
    assert told - {"what ours does", "---"} == {rule.reason for rule in DIFFERENCES}


def test_no_damage_to_an_answer_is_excused(request: pytest.FixtureRequest) -> None:
    """Each result doubled, set to nothing, shifted in one place, made NaN: where ours may differ from the reference."""
    cases = [*CASES.values(), *read_cases(oracle_path(request.config))]
    covered, seen = [case for case in cases if any(rule.covers(case) for rule in DIFFERENCES)], 0
    for case, answer in answers_of(covered):
        if judge_outcome(case, answer).kind is not Kind.DIFFERS and case.id not in CASES:
            continue
        for where, fault in faults(case, answer):
            verdict = judge_outcome(case, fault)
            assert verdict.kind is Kind.FAILED, (case.id, where, verdict)
            seen += 1
    assert seen > 200


DEFINITIONS = {
    "advantage": right_advantages,
    "agg": right_aggregate,
    "policy_loss": right_policy,
    "rollout_correction": right_of_correction,
}


def test_the_definitions_say_what_the_reference_says_where_no_rule_is_needed(request: pytest.FixtureRequest) -> None:
    cases, seen = [*CASES.values(), *read_cases(oracle_path(request.config))], 0
    others = ("value_loss", "bypass_mode", "unknown_name")
    cases = [case for case in cases if case.section in DEFINITIONS and case.fn not in others and not case.refused]
    for case, answer in answers_of([c for c in cases if not any(rule.covers(c) for rule in DIFFERENCES)]):
        right, expected = DEFINITIONS[case.section](case), answer.expected or case.expected
        assert not isinstance(right, Refused)
        assert mismatch(overlaid(expected, restricted(right, expected)), expected, case.id) is None
        seen += 1
    assert seen >= 4


def test_a_refusal_is_excused_where_it_is_right_and_nowhere_else() -> None:
    refusal = ContractError("no")
    right = {"batch.reorder.h34", "agg.agg_loss.h05"}
    for case in CASES.values():
        assert (judge_outcome(case, refusal).kind is Kind.FAILED) == (case.id not in right), case.id


def test_a_value_where_the_rule_refuses_fails() -> None:
    case = CASES["batch.reorder.h34"]
    assert judge_outcome(case, Answer({"x": [1, 1], "s": ["r1", "r1"], "meta": {}})).kind is Kind.FAILED


def test_a_refusal_that_was_expected_must_come() -> None:
    case = changed(CASES["agg.agg_loss.h04"], raises="ValueError", message="refused")
    assert judge(case).kind is Kind.FAILED


def test_agreeing_with_a_reference_that_is_wrong_fails() -> None:
    case = CASES["advantage.rloo.h02"]
    theirs = case.expected["advantages"][case.mask()]
    assert judge_outcome(case, Answer({"advantages": theirs, "returns": theirs})).kind is Kind.FAILED


def test_what_nothing_of_ours_answers_fails() -> None:
    verdict = judge(Case("x.y.0", "x", "y", "-", Inputs({}), {}, False))
    assert verdict.kind is Kind.FAILED and "x.y" in verdict.reason


def test_an_input_that_nothing_reads_fails() -> None:
    for case in (CASES["advantage.grpo.h00"], CASES["numeric.lr_schedule.h24"], CASES["kl.kl_penalty.h03"]):
        verdict = judge(given(case, temperature=2.0))
        assert verdict.kind is Kind.FAILED and "temperature" in verdict.reason
    unknown = judge(given(CASES["policy_loss.vanilla.h07"], config=Inputs({"clip_ration": 0.1})))
    assert unknown.kind is Kind.FAILED and "clip_ration" in unknown.reason


def test_inside_another_input_it_is_told_by_both_names() -> None:
    inputs = Inputs({"a": {"b": 1, "c": {"d": 2}}, "e": 3})
    assert inputs.unread() == ["a", "e"]
    assert inputs["a"]["b"] == 1 and "e" in inputs
    assert inputs.unread() == ["e", "a.c"]
    assert inputs.plain() == {"a": {"b": 1, "c": {"d": 2}}, "e": 3} and inputs.unread() == []
    inputs.forget()
    assert inputs.unread() == ["a", "e"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("x"), Kind.FAILED),
        (RuntimeError("x"), Kind.FAILED),
        (AssertionError("x"), Kind.FAILED),
        (NotBuiltError("x"), Kind.FAILED),
        (ModuleNotFoundError("no", name="tandem.nowhere"), Kind.FAILED),
        (ModuleNotFoundError("no", name="math_verify"), Kind.NOT_INSTALLED),
    ],
    ids=repr,
)
def test_whatever_an_adapter_raises_there_is_a_verdict(
    error: Exception, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(case: Case) -> Answer:
        raise error

    for case in (CASES["advantage.grpo.h00"], CASES["policy_loss.clip_cov.h19"]):  # the second one is random
        monkeypatch.setitem(ADAPTERS, (case.section, case.fn), breaks)
        assert judge(case).kind is kind


def test_a_random_case_without_a_rule_fails() -> None:
    assert judge(replace(CASES["kl.kl_penalty.h03"], random=True)).kind is Kind.FAILED


def test_values_are_decoded() -> None:
    pool = {"p": {"__tensor__": "bool", "shape": [2], "data": [True, False]}}
    assert decode({"$": "p"}, pool).tolist() == [True, False]
    assert decode({"a": ["NaN", 1, "-Infinity"]}, pool)["a"][2] == -math.inf
    assert math.isnan(decode("NaN", pool))
    assert decode({"__array__": "object", "shape": [2], "data": ["x", "y"]}, pool) == ["x", "y"]


def test_mismatches_are_seen() -> None:
    ones = torch.ones(2)
    assert mismatch({"a": ones, "b": 1.0}, {"a": ones}, "r") is None
    assert "keys" in str(mismatch({}, {"a": ones}, "r"))
    assert "shape" in str(mismatch(torch.ones(3), ones, "r"))
    assert "off by" in str(mismatch(torch.tensor([1.0, math.nan]), ones, "r"))
    assert mismatch(None, ones, "r") is not None
    assert mismatch(["a"], ["b"], "r") is not None
    parts = [{"x": [0, 1]}, {"x": [2]}]
    assert mismatch(parts, parts, "r") is None
    assert mismatch([{"x": [0, 1]}, {"x": [3]}], parts, "r") is not None
    assert mismatch(parts[:1], parts, "r") is not None
    assert mismatch([[0, 1], [2]], [[0, 1], [2]], "r") is None


def test_other_formats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"format": "something/2", "cases": []}))
    with pytest.raises(ValueError, match="hybrid-oracle/1"):
        read_cases(path)
