"""The table of ``docs/errors.md``: each kind of bad input, what is said, and the test that shows it."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "errors.md"
HEAD = "| what is wrong | what happens | what is said | shown by |"
_CELL = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Kind:
    """A row. ``said`` are the texts in code marks, without what varies (``…``); ``tests`` are file and name."""

    line: int
    wrong: str
    happens: str
    said: tuple[str, ...]
    tests: tuple[tuple[str, str], ...]


def read_kinds(page: str) -> list[Kind]:
    """The rows of all tables that begin with ``HEAD``. Raises ``ValueError`` for one that says or shows nothing."""
    kinds, inside = [], False
    for number, line in enumerate(page.splitlines(), start=1):
        if not line.startswith("|"):
            inside = False
        elif line == HEAD:
            inside = True
        elif inside and not set(line) <= set("| -"):
            cells = [cell.strip().replace("\\|", "|") for cell in _CELL.split(line)[1:-1]]
            if len(cells) != 4:
                raise ValueError(f"line {number}: {len(cells)} cells")
            said = tuple(part.strip() for text in re.findall(r"`([^`]+)`", cells[2]) for part in text.split("…"))
            tests = tuple(re.findall(r"`([\w/]+\.py)::(\w+)`", cells[3]))
            kind = Kind(number, cells[0], cells[1], tuple(part for part in said if part), tests)
            if not (kind.wrong and kind.happens and kind.said and kind.tests):
                raise ValueError(f"line {number}: what is wrong, what happens, what is said, and a test")
            kinds.append(kind)
    return kinds


@functools.cache
def texts_of_the_code() -> str:
    """Every text in the source, what stands in braces of an f-string left out as ``…``; one a line."""
    found = []
    for file in sorted((ROOT / "tandem").rglob("*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings say nothing
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))  # type: ignore[misc]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
                found.append(node.value)
    return "\n".join(found)


def names_in(file: str) -> set[str]:
    """The names of the test functions in ``tests/FILE``, those of classes too; none where there is no such file."""
    path = ROOT / "tests" / file
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
