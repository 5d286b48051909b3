"""Scorer of programs: the answer's code is run against tests in a sandbox."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from tandem.base.errors import DataError
from tandem.reward.registry import register_reward
from tandem.reward.sandbox import Ending, Isolation, Sandbox

_BLOCK = re.compile(r"```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)```", re.DOTALL)
_PYTHON = ("python", "py", "python3")
_EXAMPLE = (
    '{"inputs": [...], "outputs": [...]} (with "fn_name" for calls instead of standard input), or assert statements'
)


class Test(NamedTuple):
    """One test of a program: text in and out, a call and its value, or code that raises unless it passes."""

    kind: Literal["stdin", "call", "assert"]
    given: Any
    expected: Any = None
    function: str = ""


@register_reward("code")
def code(
    response: str,
    ground_truth: object,
    *,
    partial: bool = False,
    seconds: float = 5.0,
    total_s: float = 20.0,
    memory_mb: int = 512,
    output_kb: int = 1024,
    fenced: bool = True,
    isolation: Isolation = "full",
) -> dict[str, float]:
    """1 if the answer's program passes all tests of the ground truth, else 0; the metric ``passed`` is their fraction.

    ``partial``: the score is that fraction. The program is the last fenced block of Python; without ``fenced`` the
    whole answer is, where it has no block. Tests are ``{"inputs": [...], "outputs": [...]}`` for standard input and
    output, the same with ``fn_name`` for calls of a function, or code with asserts: a text, or a list of texts. Each
    runs in a process of its own with ``seconds`` of time and ``memory_mb`` of memory; those that haven't begun
    ``total_s`` after the first fail. What ``isolation`` protects from is said in ``tandem.reward.sandbox``.
    """
    tests = read_tests(ground_truth)
    program = find_program(response)
    if program is None and not fenced:
        program = response
    if program is None:
        return {"score": 0.0, "passed": 0.0}
    sandbox = _checked_sandbox(isolation, seconds, memory_mb, output_kb)
    end, passed = time.monotonic() + total_s, 0
    for test in tests:
        left = end - time.monotonic()
        if left > 0 and _passes(sandbox, program, test, min(seconds, left)):
            passed += 1
        elif not partial:
            break
    fraction = passed / len(tests)
    return {"score": fraction if partial else float(passed == len(tests)), "passed": fraction}


@functools.lru_cache(maxsize=8)
def _checked_sandbox(isolation: Isolation, seconds: float, memory_mb: int, output_kb: int) -> Sandbox:
    sandbox = Sandbox(isolation, seconds, memory_mb, output_kb)
    sandbox.check()
    return sandbox


def find_program(text: str) -> str | None:
    """The last fenced block that is marked as Python, else the last that isn't marked; None if there is none."""
    blocks = [(mark.lower(), block) for mark, block in _BLOCK.findall(text)]
    for marks in (_PYTHON, ("",)):
        found = [block for mark, block in blocks if mark in marks]
        if found:
            return str(found[-1])
    return None


def read_tests(ground_truth: object) -> list[Test]:
    """The tests of a data row, at least one. Raises ``DataError`` naming the forms that there are."""
    written = _unpacked(ground_truth)
    tests: list[Test] = []
    if isinstance(written, Mapping) and {"inputs", "outputs"} <= set(written):
        inputs, outputs = _unpacked(written["inputs"]), _unpacked(written["outputs"])
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs):
            name = written.get("fn_name")
            tests = [_test(given, expected, name) for given, expected in zip(inputs, outputs, strict=True)]
    elif isinstance(written, str) and written.strip():
        tests = [Test("assert", written)]
    elif isinstance(written, list) and all(isinstance(text, str) for text in written):
        tests = [Test("assert", text) for text in written]
    if not tests:
        raise DataError(f"ground_truth {str(ground_truth)[:80]!r} has no tests: code wants {_EXAMPLE}")
    return tests


def _unpacked(value: object) -> object:
    """What a column may hold in place of a list or dict: an array, or JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return list(value) if isinstance(value, tuple) else value


def _test(given: Any, expected: Any, function: str | None) -> Test:
    if not function:
        return Test("stdin", _lines(given), _lines(expected))
    if isinstance(given, str):  # one argument a line, as JSON, and so is the value
        try:
            given = [json.loads(line) for line in given.splitlines() if line.strip()]
            expected = json.loads(expected) if isinstance(expected, str) else expected
        except ValueError as error:
            raise DataError(f"the call {given!r} -> {expected!r} is no JSON, an argument a line: {error}") from error
    arguments = _unpacked(given)
    return Test("call", arguments if isinstance(arguments, list) else [arguments], _unpacked(expected), function)


def _lines(value: Any) -> str:
    value = value.tolist() if hasattr(value, "tolist") else value
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _passes(sandbox: Sandbox, program: str, test: Test, seconds: float) -> bool:
    if test.kind == "assert":
        return sandbox.passes(program, test.given, seconds)
    if test.kind == "stdin":
        ended = sandbox.run(program, test.given, seconds)
        return ended.ending is Ending.DONE and same_output(ended.output, test.expected)
    ended = sandbox.call(program, test.function, test.given, seconds)
    try:
        value = json.loads(ended.result)
    except (ValueError, RecursionError):  # a program may say anything
        return False
    return ended.ending is Ending.DONE and value in (test.expected, *_alone(test.expected))


def _alone(expected: Any) -> list[Any]:
    """Some data sets put a call's value into a list of its own."""
    return expected if isinstance(expected, list) and len(expected) == 1 else []


def same_output(output: str, expected: str) -> bool:
    """Whether two outputs have the same lines, blanks at their ends and empty lines at the end aside."""
    return _stripped(output) == _stripped(expected)


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
