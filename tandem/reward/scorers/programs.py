"""Scorer of programs: the answer's code is run against tests in a sandbox."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tandem.base.errors import DataError
from tandem.reward.ranges import Count, Positive
from tandem.reward.registry import Objection, register_reward
from tandem.reward.sandbox.run import Ending, Isolation, Sandbox
from tandem.reward.sandbox.walls import find_package

_MARK = re.compile(r"[ \t]*([\w+#.-]*)")
_FENCE = re.compile(r"([ \t]*)```([\w+#.-]?)")
_INDENTED = 4  # columns from which on a fence belongs to the program (CommonMark)
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


def check_code(parameters: Mapping[str, Any]) -> Iterator[Objection]:
    """Object to packages that are not installed."""
    for name in parameters["packages"] or ():
        if not find_package(name):
            yield Objection("packages", f"there is no installed package {name!r}", f"Install {name}, or leave it out")


@register_reward("code", check=check_code)
def code(
    response: str,
    ground_truth: object,
    *,
    partial: bool = False,
    seconds: Positive = 5.0,
    total_s: Positive = 20.0,
    memory_mb: Count = 512,
    output_kb: Count = 1024,
    fenced: bool = True,
    isolation: Isolation = "full",
    packages: Sequence[str] | None = None,
) -> dict[str, float]:
    """Return 1 if the answer's program passes all tests of the ground truth, else 0; the metric ``passed`` is their
    fraction.

    ``partial``: the score is that fraction. The program is the last fenced block of Python; without ``fenced`` the
    whole answer is, where it has no block. Tests are ``{"inputs": [...], "outputs": [...]}`` for standard input and
    output, the same with ``fn_name`` for calls of a function, or code with asserts: a text, or a list of texts. Each
    runs in a process of its own with ``seconds`` of time and ``memory_mb`` of memory; those that haven't begun
    ``total_s`` after the first fail. What ``isolation`` protects from is said in ``tandem.reward.sandbox.run``.
    """
    tests = read_tests(ground_truth)
    program = find_program(response)
    if program is None and not fenced:
        program = response
    if program is None:
        return {"score": 0.0, "passed": 0.0}
    sandbox = _checked_sandbox(isolation, seconds, memory_mb, output_kb, tuple(packages or ()))
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
def _checked_sandbox(
    isolation: Isolation, seconds: float, memory_mb: int, output_kb: int, packages: tuple[str, ...]
) -> Sandbox:
    sandbox = Sandbox(isolation, seconds, memory_mb, output_kb, packages)
    sandbox.check()
    return sandbox


def find_program(text: str) -> str | None:
    """Return the last fenced block that is marked as Python, else the last that isn't marked; None if there is none.

    A block ends at a fence that begins a line. One inside a line (in a string, say) belongs to the program, unless no
    other ends it.
    """
    blocks = list(_blocks(text))
    for marks in (_PYTHON, ("",)):
        found = [block for mark, block in blocks if mark in marks]
        if found:
            return str(found[-1])
    return None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the mark of each fenced block, in lower case, and what is in it."""
    opened: tuple[str, int] | None = None
    block: list[str] = []
    for line in text.split("\n"):
        fence = _FENCE.match(line)
        if opened is not None and fence is not None and len(fence[1]) < opened[1] + _INDENTED:
            if not fence[2]:
                yield opened[0], _joined(block)
                opened = None
                continue
            yield from _cut(opened[0], block)  # another one opens
            opened = None
        if opened is not None:
            block.append(line)
        elif line.count("```") == 1:
            mark = _MARK.match(line, line.index("```") + 3)
            opened, block = (mark[1].lower() if mark else "", len(line) - len(line.lstrip())), []
    if opened is not None:
        yield from _cut(opened[0], block)


def _cut(mark: str, block: list[str]) -> Iterator[tuple[str, str]]:
    """Yield a block that no line ends, up to its last fence; none where it has none."""
    inside, fence, _ = "\n".join(block).rpartition("```")
    if fence:
        yield mark, inside


def _joined(block: list[str]) -> str:
    return "".join(line + "\n" for line in block)


def read_tests(ground_truth: object) -> list[Test]:
    """Return the tests of a data row, at least one. Raises ``DataError`` naming the forms that there are."""
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
    """Return what a column may hold in place of a list or dict: an array, or JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
        except RecursionError as error:
            raise DataError(f"ground_truth {value[:40]!r} is nested too deeply to be read") from error
    return list(value) if isinstance(value, tuple) else value


def _test(given: Any, expected: Any, function: str | None) -> Test:
    """Read one test. A call whose input is text has one argument a line, as JSON, and so is its value where it is text.

    Where the input is a list, the arguments and the value are what stands there: a text is a text.
    """
    if not function:
        return Test("stdin", _lines(given), _lines(expected))
    if isinstance(given, str):
        try:
            arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
            expected = json.loads(expected) if isinstance(expected, str) else expected
        except (ValueError, RecursionError) as error:
            call = f"{given[:80]!r} -> {str(expected)[:80]!r}"
            raise DataError(f"the call {call} is no JSON, an argument a line: {error}") from error
        return Test("call", arguments, _listed(expected), function)
    arguments = _listed(given)
    return Test("call", arguments if isinstance(arguments, list) else [arguments], _listed(expected), function)


def _listed(value: Any) -> Any:
    """Return the value with lists for the arrays and tuples that a column may hold, at any depth."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


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
        same = any(_same(value, expected) for expected in (test.expected, *_alone(test.expected)))
    except (ValueError, RecursionError):  # a program may say anything
        return False
    return ended.ending is Ending.DONE and same


def _same(value: Any, expected: Any) -> bool:
    """Return whether two values are equal as JSON: 1 is 1.0, and true is not 1."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same(value[key], expected[key]) for key in value)
    return isinstance(value, bool) is isinstance(expected, bool) and bool(value == expected)


def _alone(expected: Any) -> list[Any]:
    """Take a call's value out of the list of its own into which some data sets put it."""
    return expected if isinstance(expected, list) and len(expected) == 1 else []


def same_output(output: str, expected: str) -> bool:
    """Return whether two outputs have the same lines, blanks at their ends and empty lines at the end aside."""
    return _stripped(output) == _stripped(expected)


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
