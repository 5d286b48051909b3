"""The harness itself: a wrong answer must fail, and a difference must be one that a rule allows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.oracle.oracle_advantage
import tests.oracle.oracle_loss
import tests.oracle.oracle_statistics  # noqa: F401
from tests.oracle.oracle_file import Case, decode, read_cases
from tests.oracle.oracle_verdict import Kind, judge, mismatch

SAMPLE = Path(__file__).parent / "sample.json"


def changed(case: Case, **expected: Any) -> Case:
    return Case(case.id, case.section, case.fn, case.scenario, case.inputs, {**case.expected, **expected}, case.random)


def verdicts() -> dict[str, Kind]:
    return {case.id: judge(case).kind for case in read_cases(SAMPLE)}


def test_the_sample_passes_and_differs_where_it_should() -> None:
    found = verdicts()
    differing = {case for case, kind in found.items() if kind is Kind.DIFFERS}
    assert differing == {"advantage.rloo.h02", "agg.agg_loss.h06"}
    assert set(found.values()) == {Kind.PASSED, Kind.DIFFERS}


@pytest.mark.parametrize("case", read_cases(SAMPLE)[:2], ids=lambda case: case.id)
def test_a_wrong_number_fails(case: Case) -> None:
    wrong = case.expected["advantages"].clone()
    wrong[0, 1] += 1e-3
    assert judge(changed(case, advantages=wrong)).kind is Kind.FAILED


def test_a_refusal_that_was_expected_must_come() -> None:
    case = next(case for case in read_cases(SAMPLE) if case.id == "agg.agg_loss.h04")
    assert judge(changed(case, raises="ValueError", message="refused")).kind is Kind.FAILED


def test_what_nothing_of_ours_answers_fails() -> None:
    verdict = judge(Case("x.y.0", "x", "y", "-", {}, {}, False))
    assert verdict.kind is Kind.FAILED and "x.y" in verdict.reason


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


def test_other_formats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"format": "something/2", "cases": []}))
    with pytest.raises(ValueError, match="hybrid-oracle/1"):
        read_cases(path)
