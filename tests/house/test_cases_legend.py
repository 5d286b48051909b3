"""The legend: it has the ids that tests use and no others, and names the tests of each fault that was seen in use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.errors_page import names_in

TESTS = Path(__file__).parents[1]
LEGEND = (TESTS / "cases.md").read_text("utf-8")
# An id is a word, or begins or ends the name of a test: `b42`, `test_b42_…`, `…_b42`.
CASE = re.compile(r"(?<![a-z0-9])(b\d\d)(?![a-z0-9])")
FAULT = re.compile(r"^\| `F(\d+)` \| (.+) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)


def test_the_legend_has_the_ids_that_the_tests_use() -> None:
    used = {found for file in TESTS.rglob("*.py") for found in CASE.findall(file.read_text("utf-8"))}
    legend = set(re.findall(r"^\| `(b\d\d)` \|", LEGEND, re.MULTILINE))
    assert used == legend


def test_every_line_of_the_table_of_faults_is_one_of_it_in_its_order() -> None:
    numbers = [int(number) for number, *_ in FAULT.findall(LEGEND)]
    assert numbers == sorted(set(numbers)) and len(numbers) == LEGEND.count("\n| `F") >= 72


@pytest.mark.parametrize("fault", FAULT.findall(LEGEND), ids=lambda fault: f"F{fault[0]}")
def test_a_fault_that_was_seen_is_shown_by_tests(fault: tuple[str, ...]) -> None:
    shown = re.findall(r"`([\w/]+\.py)::(\w+)`", fault[-1])
    assert shown and len(shown) == fault[-1].count("::")
    missing = [f"tests/{file} has no {name}" for file, name in shown if name not in names_in(file)]
    assert not missing
