"""``long`` parts the tests in two, and nothing is lost between them: what is long is marked, listed, and run by CI."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.errors_page import names_in
from tests.house.long_marks import SEEN

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGE = (ROOT / "docs" / "decisions" / "long-tests.md").read_text("utf-8")
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
ROW = re.compile(r"^\| `([\w/]+\.py)::(\w+)`[^|]*\| ([\d.]+) \| `([\w/]+\.py)::(\w+)`[^|]*\|", re.MULTILINE)
Test = tuple[str, str]


def is_long(node: ast.AST) -> bool:
    """Whether a node is ``pytest.mark.long``."""
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.long"


def marked(source: str) -> Iterator[str]:
    """The functions whose decorators name the mark, for all cases or some; ``?`` for each mark anywhere else."""
    tree = ast.parse(source)
    inside = 0
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found = sum(is_long(part) for decorator in node.decorator_list for part in ast.walk(decorator))
            inside += found
            yield from [node.name] * bool(found)
    yield from "?" * (sum(map(is_long, ast.walk(tree))) - inside)


def long_tests() -> set[Test]:
    return {(str(file.relative_to(TESTS)), name) for file in TESTS.rglob("*.py") for name in marked(file.read_text())}


def rows() -> list[tuple[Test, float, Test]]:
    return [((file, name), float(cost), (near, other)) for file, name, cost, near, other in ROW.findall(PAGE)]


def recipe(target: str) -> str:
    """The lines of a target of the Makefile."""
    found = re.search(rf"^{target}:[^\n]*\n((?:\t[^\n]*\n)+)", MAKEFILE, re.MULTILINE)
    assert found is not None
    return found[1]


def test_a_mark_is_found_wherever_it_stands() -> None:
    source = """
@pytest.mark.long
def test_one(): ...

@pytest.mark.parametrize("case", [1, pytest.param(2, marks=pytest.mark.long)])
def test_some(case): ...

def test_none(): ...

pytestmark = pytest.mark.long
"""
    assert list(marked(source)) == ["test_one", "test_some", "?"]


def test_what_is_marked_is_what_the_page_lists() -> None:
    assert long_tests() == {test for test, _, _ in rows()}
    assert len(rows()) == PAGE.count("\n| `")


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][1])
def test_a_long_test_costs_much_and_has_a_cheaper_neighbour(row: tuple[Test, float, Test]) -> None:
    (file, name), cost, (near, other) = row
    assert cost > 8
    assert name in names_in(file) and other in names_in(near)
    assert (near, other) != (file, name) or "pytest.param" in (TESTS / file).read_text()  # another case of it
    everywhere_long = {test for test in long_tests() if test != (file, name)}
    assert (near, other) not in everywhere_long


def test_nothing_marks_a_test_behind_its_back() -> None:
    """A hook that adds the mark by its name would not be found above."""
    adding = re.compile(r"""(add_marker|getattr)\([^\n]*["']long["']""")
    assert not [file for file in TESTS.rglob("*.py") if adding.search(file.read_text("utf-8"))]


def test_the_two_targets_run_all_between_them() -> None:
    test, long = recipe("test"), recipe("test-long")
    assert "pytest $(PARALLEL) -m 'not long')" in test
    assert long.rstrip().endswith("pytest $(PARALLEL) -m long $(LONG)")
    assert "long" not in re.search(r"^PARALLEL := .*$", MAKEFILE, re.MULTILINE)[0]  # type: ignore[index]
    pattern = re.search(
        r"^LONG := \$\(shell grep -rl --include='test_\*\.py' '(.+)' tests \| sort\)$", MAKEFILE, re.MULTILINE
    )
    assert pattern is not None
    reached = {
        str(file.relative_to(TESTS)) for file in TESTS.rglob("test_*.py") if re.search(pattern[1], file.read_text())
    }
    assert {file for file, _ in long_tests()} <= reached


def test_ci_runs_both_one_after_the_other() -> None:
    lines = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    assert lines.index("make test-long") == lines.index("make test") + 1
    assert "set -euo pipefail" in lines


def test_pytest_sees_the_mark_where_the_page_says_so(request: pytest.FixtureRequest) -> None:
    """In ``make test`` all is collected, so this holds for all: ``-m long`` takes what it leaves, and nothing else."""
    seen = request.config.stash[SEEN]
    assert seen.long == {test for test, _, _ in rows()} & seen.collected
