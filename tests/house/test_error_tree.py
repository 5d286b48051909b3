"""The tree of errors on top of ``tandem/base/errors.py`` is that of the classes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import tandem.base.errors

PACKAGE = Path(tandem.base.errors.__file__).parents[1]
LINE = re.compile(
    r"^(?P<branch>(?:[│ ]   )*(?:[├└]── )?)(?P<name>\w+Error)\b {2,}\S.*?(?:: (?P<home>tandem\.[\w.]+))?$"
)


def told() -> dict[str, tuple[str | None, str]]:
    """The parent and the module of each error of the tree."""
    found: dict[str, tuple[str | None, str]] = {}
    path: list[str] = []
    for line in (tandem.base.errors.__doc__ or "").splitlines():
        if match := LINE.match(line):
            depth = len(match["branch"]) // 4
            path[depth:] = [match["name"]]
            found[match["name"]] = (path[depth - 1] if depth else None, match["home"] or "tandem.base.errors")
    return found


def written() -> dict[str, tuple[str | None, str]]:
    """The first base and the module of each class that is a ``TandemError``."""
    bases: dict[str, tuple[str, str]] = {}
    for file in PACKAGE.rglob("*.py"):
        module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and node.bases:
                bases[node.name] = (ast.unparse(node.bases[0]), module)
    found: dict[str, tuple[str | None, str]] = {"TandemError": (None, "tandem.base.errors")}
    while more := {name: known for name, known in bases.items() if known[0] in found and name not in found}:
        found |= more
    return found


def test_every_error_stands_in_the_tree_where_it_belongs() -> None:
    assert told() == written()
