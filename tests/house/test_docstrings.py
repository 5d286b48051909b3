"""Docstrings say something where they are read: a whole sentence that points nowhere else.

A function's says what calling it does, so it begins with a verb. That of a class or a property may name a thing, as the
class and the property do, but with more words than the name has.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tandem

PACKAGE = Path(tandem.__file__).parent
FEWEST_WORDS = 4
VERBS = """
Accept Add Allow Answer Append Apply Ask Assemble Attend Begin Bind Bring Build Call Carry Cast Check Choose Close
Collect Compare Compute Connect Continue Convert Copy Count Cut Deal Deliver Derive Describe Divide Do Draw Drop End
Evaluate Explain Fetch Fill Find Fine-tune Finish Forget Fork Free Gather Generate Get Give Go Grow Guard Hand
Handle Have Hold Ignore Import Join Judge Keep Kill Lay Learn Leave Lend Let List Listen Load Log Look Make Map Meet
Merge Move Multiply Name Note Object Open Order Overwrite Own Pack Pass Place Plan Prefill Print Project Prove Pull
Put Raise Read Receive Refuse Release Remove Rename Repeat Replace Report Require Reserve Reset Resolve Restore
Return Rewrite Run Save Say Score Seal Send Serve Set Settle Shard Share Show Silence Sleep Sort Split Start Step
Stop Store Submit Supply Swap Switch Take Tell Time Train Translate Turn Use Wait Wake Warn Watch Weigh Wrap Write
Yield Zero
"""
"""What a function's docstring may begin with; a new one that is a verb belongs here."""

STOP_WORDS = "a an and are as at be by for in is it its of on one or that the this to what which with"
NO_BEGINNING = re.compile(r"(See|Of|Its?|It\.|Those|For a|For JSON|All of them|Undo)\b")
"""How a sentence begins that needs another one, or the name above it, to be understood."""


Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(source: str) -> Iterator[tuple[Documented, str]]:
    """Each class and function, with the first paragraph of its docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Documented):
            text = ast.get_docstring(node)
            if text is not None:
                yield node, " ".join(text.split("\n\n")[0].split())


def names_a_thing(node: Documented) -> bool:
    """Whether ``node`` is a class, or a property of one."""
    return isinstance(node, ast.ClassDef) or any("property" in ast.unparse(it) for it in node.decorator_list)


def words_in(text: str) -> set[str]:
    """The words of a text or of a name, in lower case and without a plural's s."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower()
    return {word.rstrip("s") for word in re.findall("[a-z]+", apart)}


def lacking(node: Documented, text: str) -> str:
    """What the docstring of ``node`` lacks beside a form; empty if nothing."""
    if not names_a_thing(node) and text.split()[0].strip(",:;") not in VERBS.split():
        return "does not begin with a verb"
    return "" if words_in(text) - words_in(node.name) - set(STOP_WORDS.split()) else "says what the name says"


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


@pytest.mark.parametrize(
    "source",
    [
        'def rows(batch):\n    """The rows of a batch, in order."""',
        'class Store:\n    def put(self, row):\n        """One row for the store."""',
        'class GroupStorage:\n    """The storage of a group."""',
        'class Store:\n    @property\n    def free_rows(self):\n        """The rows that are free."""',
    ],
)
def test_a_function_without_a_verb_and_a_name_said_again_are_found(source: str) -> None:
    assert any(lacking(node, text) for node, text in docstrings(source))


def test_a_verb_or_more_than_the_name_is_enough() -> None:
    source = 'class Store:\n    """Where rows are kept."""\n    def put(self, row):\n        """Keep a row, last."""'
    assert not any(lacking(node, text) for node, text in docstrings(source))


def test_every_docstring_is_a_sentence() -> None:
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{node.lineno} {node.name}: {text!r} {problem}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node, text in docstrings(path.read_text("utf-8"))
        if (problem := fault(text) or lacking(node, text))
    ]
    assert found == []


def is_protocol(node: Documented) -> bool:
    return isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)


def test_what_a_protocol_says_follows_it_is_there() -> None:
    trees = {path: path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    defined = {node.name for source in trees.values() for node in ast.walk(ast.parse(source)) if hasattr(node, "name")}
    named = {
        (str(path.relative_to(PACKAGE)), name)
        for path, source in trees.items()
        for node, text in docstrings(source)
        if is_protocol(node)
        for name in re.findall(r"``([A-Z][A-Za-z]+)[`.]", text)
    }
    assert len(named) >= 30
    assert {(path, name) for path, name in named if name not in defined and not name.endswith("Error")} == set()
