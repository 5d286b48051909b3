"""Declared columns."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tandem.base.errors import ContractError
from tandem.columns.schema import Found, Kind, check, declare_column, declared_columns


def test_planning_reads_the_schema_without_torch() -> None:
    code = "import sys, tandem.columns.schema; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_misspelt_column_gets_the_near_name() -> None:
    with pytest.raises(ContractError, match=r"'rollout_logprob'.*did you mean 'rollout_logprobs'"):
        check({"rollout_logprob": Found(Kind.RAGGED, "float32")})


def test_errors_name_column_expected_and_got() -> None:
    with pytest.raises(ContractError, match=r"'advantages': expected dtype float32, got float64"):
        check({"advantages": Found(Kind.RAGGED, "float64")})
    with pytest.raises(ContractError, match=r"'rewards': expected a tensor .* got ragged rows"):
        check({"rewards": Found(Kind.RAGGED, "float32")})


def test_declaring_twice() -> None:
    first = declare_column("tool_calls", "row", "int64", "number of tool calls")
    assert declare_column("tool_calls", Kind.ROW, "int64", "number of tool calls") == first
    assert declared_columns()["tool_calls"] == first
    with pytest.raises(ContractError, match="declared already as row of int64"):
        declare_column("tool_calls", "row", "float32", "seconds in tools")


@pytest.mark.parametrize("name", ["two words", "1st", "a.b", ""])
def test_a_column_is_named_like_a_parameter(name: str) -> None:
    with pytest.raises(ContractError, match="identifier"):
        declare_column(name, "row", "int64", "x")


def test_only_ragged_columns_are_aligned() -> None:
    with pytest.raises(ContractError, match="ragged"):
        declare_column("sad", "row", "int64", "x", aligned_with="responses")
    with pytest.raises(ContractError, match="ragged"):
        declare_column("sad", "ragged", "int64", "x", aligned_with="rewards")


def test_every_standard_column_is_documented() -> None:
    for spec in declared_columns().values():
        assert spec.description
        assert spec.dtype
