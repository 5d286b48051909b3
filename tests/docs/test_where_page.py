"""The page "where is …?" names files and names that are there, a few for each question."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| (.+?\?) \| (.+) \|$", (ROOT / "docs" / "where.md").read_text("utf-8"), re.MULTILINE)
LINK = re.compile(r"\[(tandem/[\w/.]+)\]\(\.\./\1\)(?: `([\w.]+)`)?")


def defined(tree: ast.Module | ast.ClassDef) -> dict[str, ast.AST]:
    """Functions and classes that stand directly in ``tree``, by name."""
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize(("question", "answer"), ROWS, ids=[question for question, _ in ROWS])
def test_the_answer_names_what_is_there(question: str, answer: str) -> None:
    places = LINK.findall(answer)
    assert 1 <= len(places) <= 3 and answer.count("](../tandem/") == len(places)
    for file, name in places:
        found: ast.AST = ast.parse((ROOT / file).read_text("utf-8"))
        for part in name.split(".") if name else ():
            assert isinstance(found, ast.Module | ast.ClassDef)
            assert part in defined(found), (file, name)
            found = defined(found)[part]


def test_the_page_answers_what_newcomers_ask() -> None:
    asked = " ".join(question for question, _ in ROWS)
    assert all(
        word in asked
        for word in ("reference's log-prob", "add a stage", "another way of rolling out", "staleness bound")
    )
