"""What the source of tools and episodes says without being run. Imports no torch."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tandem.base.regular import regular
from tandem.base.source import yields


def wrong_tools(file: Path) -> str | None:
    """Say why the functions of ``file`` can't be tools; None where nothing speaks against them."""
    try:
        body = ast.parse(regular(file).read_bytes()).body
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
    except (SyntaxError, ValueError) as error:
        return f"not Python: {error}"
    functions = [
        node
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
    ]
    if not functions:
        return "it defines no function without an underscore in front, so there is no tool"
    for node in functions:
        if yields(node):
            return f"{node.name} (line {node.lineno}) is a generator (it has a yield): a tool returns its result"
        arguments = node.args
        if arguments.vararg or arguments.kwarg or arguments.posonlyargs:
            return f"{node.name} (line {node.lineno}) has parameters that can't be given by their names"
        for argument in (*arguments.args, *arguments.kwonlyargs):
            if argument.annotation is None:
                return f"{node.name} (line {node.lineno}): parameter {argument.arg!r} has no type hint"
    return None


def grades_itself(episode: Callable[..., Any]) -> bool:
    """Tell whether the episode returns a value somewhere, so that it is not for the reward manager to score."""
    try:
        source = inspect.getsource(episode)
    except (OSError, TypeError):
        return False
    return any(
        node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None)
        for node in _returns(ast.parse(textwrap.dedent(source)).body[0])
    )


def _returns(node: ast.AST) -> Iterator[ast.Return]:
    """Yield the returns of a function, and not those of functions inside it."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Return):
            yield inner
        elif not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from _returns(inner)
