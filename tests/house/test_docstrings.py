"""Docstrings say something where they are read: a whole sentence, with a noun, that points nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tandem

PACKAGE = Path(tandem.__file__).parent
FEWEST_WORDS = 4
NO_BEGINNING = re.compile(r"(See|Of|Its?|It\.|Those|For a|For JSON|All of them|Undo)\b")
"""How a sentence begins that needs another one, or the name above it, to be understood."""


def docstrings(source: str) -> Iterator[tuple[str, int, str]]:
    """Name, line and first paragraph of each class's and function's docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.name, node.lineno, " ".join(text.split("\n\n")[0].split())


def fault(text: str) -> str:
    """What is wrong with a docstring's first paragraph; empty if nothing is."""
    if NO_BEGINNING.match(text):
        return "begins as if something stood before it"
    if len(text.split()) < FEWEST_WORDS:
        return f"has fewer than {FEWEST_WORDS} words"
    if not text.endswith((".", ":", "?")):
        return "ends without a full stop"
    return "" if re.match(r"[A-Z`(\"*0-9a-z]", text) else "begins with a sign"


@pytest.mark.parametrize(
    "text",
    ["See ``DataPlane``.", "It.", "Of this process.", "Its type.", "The whole page.", "For messages.", "A forward", ""],
)
def test_what_helps_nobody_is_found(text: str) -> None:
    assert fault(text)


@pytest.mark.parametrize(
    "text", ["The number of rows in use.", "``values`` (B,) minus their mean.", "Write one line of it:"]
)
def test_what_helps_is_not(text: str) -> None:
    assert not fault(text)


def test_every_docstring_is_a_sentence() -> None:
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line} {name}: {text!r} {problem}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, line, text in docstrings(path.read_text("utf-8"))
        if (problem := fault(text))
    ]
    assert found == []
