"""Every case id in a test stands in the legend, and the legend names no case that no test has."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
# An id is a word, or begins or ends the name of a test: `b42`, `test_b42_…`, `…_b42`.
CASE = re.compile(r"(?<![a-z0-9])(b\d\d)(?![a-z0-9])")


def test_the_legend_has_the_ids_that_the_tests_use() -> None:
    used = {found for file in TESTS.rglob("*.py") for found in CASE.findall(file.read_text("utf-8"))}
    legend = set(re.findall(r"^\| `(b\d\d)` \|", (TESTS / "cases.md").read_text("utf-8"), re.MULTILINE))
    assert used == legend
