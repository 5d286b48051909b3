"""Every case of the oracle file, judged."""

from __future__ import annotations

import pytest

import tests.oracle.oracle_advantage
import tests.oracle.oracle_columns
import tests.oracle.oracle_correction
import tests.oracle.oracle_loss
import tests.oracle.oracle_reward
import tests.oracle.oracle_statistics  # noqa: F401
from tests.oracle.oracle_file import Case
from tests.oracle.oracle_verdict import Kind, Verdict, judge


def test_case(oracle_case: Case, record_verdict: list[tuple[Case, Verdict]]) -> None:
    verdict = judge(oracle_case)
    record_verdict.append((oracle_case, verdict))
    if verdict.kind is Kind.NOT_INSTALLED:
        pytest.skip(f"not installed: {verdict.reason}")
    assert verdict.kind is not Kind.FAILED, verdict.reason
