"""What the source of a function says of how it is called, read without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_CHANGES = frozenset({"cache", "lru_cache", "cached", "contextmanager", "asynccontextmanager", "property"})
"""Decorators that give something else than a function which is called anew each time."""


def yields(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a call gives a generator: a ``yield`` stands in the function itself."""
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own(function.body))


def _own(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield all nodes below ``nodes`` but for those of functions and classes inside."""
    left: list[ast.AST] = list(nodes)
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            left.extend(ast.iter_child_nodes(node))


def changing_decorator(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """Return the decorator that makes something else of a function than one which is called anew each time, if any."""
    for decorator in function.decorator_list:
        named = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(named).rpartition(".")[2] in _CHANGES:
            return ast.unparse(named)
    return None
