"""The built-in tool ``python``: the sandbox that scores programs runs what the model writes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from tandem.episodes.tools import Tool, make_tool
from tandem.reward.sandbox.run import Ending, Sandbox

NAME = "python"
"""How a config names it among the files of tools."""

# What is written to standard error would be lost, and an error is what a model learns from. The last line's value is
# shown, as a notebook does, since models write expressions and forget to print them.
_PROGRAM = """
import ast, sys, traceback
sys.stderr = sys.stdout
try:
    tree = ast.parse({code!r}, "program")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names = {{"__name__": "__main__"}}
    exec(compile(tree, "program", "exec"), names)
    value = None if last is None else eval(compile(ast.Expression(last.value), "program", "eval"), names)
    if value is not None:
        print(repr(value))
except Exception as error:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "program"]
    where = f"line {{lines[-1]}}: " if lines else ""
    print(f"{{where}}{{type(error).__name__}}: {{error}}")
    raise SystemExit(1)
"""
_SAYS = {
    Ending.LATE: "it took more than {seconds:g} s",
    Ending.FLOODED: "it printed more than {output_kb} KiB",
}


def python_tool(limits: Mapping[str, Any]) -> Tool:
    """Return the tool with the ``limits`` of ``Sandbox``. Raises ``RewardError`` where this machine has no such
    sandbox.
    """
    sandbox = _checked(tuple(sorted({**limits, "packages": tuple(limits.get("packages", ()))}.items())))

    def python(code: str) -> str:
        """Run a Python program and return what it prints, and the value of its last line."""
        ended = sandbox.run(_PROGRAM.format(code=code), "")
        if ended.ending in _SAYS:
            raise ValueError(_SAYS[ended.ending].format(seconds=sandbox.seconds, output_kb=sandbox.output_kb))
        text = ended.output.strip()
        if ended.ending is Ending.FAILED:
            raise ValueError(text or "the program failed and said nothing")
        return text

    return make_tool(NAME, python)


@functools.lru_cache(maxsize=4)
def _checked(limits: tuple[tuple[str, Any], ...]) -> Sandbox:
    sandbox = Sandbox(**dict(limits))
    sandbox.check()
    return sandbox
