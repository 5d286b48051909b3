"""Calls of tools in the text that a model wrote, in the formats that models are trained to write."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """One call: the ``name`` of a tool and its ``arguments`` by name."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Parsed:
    """What a turn says: its ``content`` outside of calls, the ``calls``, and why something was no call (``errors``)."""

    content: str
    calls: tuple[Call, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass
class _Found:
    calls: list[Call] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Take the JSON of one call, or of a list of calls."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            self.errors.append(f"not JSON: {error}")
            return
        for item in value if isinstance(value, list) else [value]:
            self.add_value(item)

    def add_value(self, item: Any) -> None:
        """Take one call that JSON has been read into."""
        name = item.get("name") if isinstance(item, dict) else None
        arguments = item.get("arguments", item.get("parameters", {})) if isinstance(item, dict) else None
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        if isinstance(name, str) and isinstance(arguments, dict):
            self.calls.append(Call(name, arguments))
        else:
            self.errors.append('a call is an object {"name": ..., "arguments": {...}}')

    def parsed(self, content: str) -> Parsed:
        """Return the result, with ``content`` outside of the calls."""
        return Parsed(content.strip(), tuple(self.calls), tuple(self.errors))


def parse_hermes(text: str) -> Parsed:
    """Read calls as Hermes and Qwen write them: a JSON object between ``<tool_call>`` and ``</tool_call>``, any
    number.
    """
    found, content = _Found(), []
    before, *parts = text.split("<tool_call>")
    content.append(before)
    for part in parts:
        inside, closed, after = part.partition("</tool_call>")
        if closed:
            found.add(inside)
        else:
            found.errors.append("<tool_call> without </tool_call>")
        content.append(after)
    return found.parsed("".join(content))


def parse_llama3(text: str) -> Parsed:
    """Read calls as Llama 3 writes them: the whole turn is a JSON object with ``parameters``, or several between
    ``;``.
    """
    found, marked = _Found(), "<|python_tag|>" in text
    before, _, after = text.partition("<|python_tag|>")
    body = (after if marked else text).strip()
    if not marked and not body.startswith("{"):
        return Parsed(text.strip())
    decoder, place = json.JSONDecoder(), 0
    while place < len(body):
        try:
            value, place = decoder.raw_decode(body, place)
        except (ValueError, RecursionError) as error:
            found.errors.append(f"not JSON: {error}")
            break
        found.add_value(value)
        place += len(re.match(r"[;\s]*", body[place:]).group())  # type: ignore[union-attr]
    return found.parsed(before if marked else "")


def parse_mistral(text: str) -> Parsed:
    """Read calls as Mistral writes them: ``[TOOL_CALLS]`` and a JSON list, or ``[TOOL_CALLS]name[ARGS]{...}`` for
    each.
    """
    found = _Found()
    before, *parts = text.split("[TOOL_CALLS]")
    for part in parts:
        name, named, arguments = part.partition("[ARGS]")
        if not named:
            found.add(part.strip())
            continue
        try:
            found.add_value({"name": name.strip().partition("[CALL_ID]")[0], "arguments": json.loads(arguments)})
        except (ValueError, RecursionError) as error:
            found.errors.append(f"not JSON: {error}")
    return found.parsed(before)


def parse_pythonic(text: str) -> Parsed:
    """Read calls as Python writes them: the turn is a list of calls with literal keyword arguments, ``[f(x=1)]``."""
    body = text.strip()
    if not body.startswith("["):
        return Parsed(body)
    try:
        tree = ast.parse(body, mode="eval").body
        if not isinstance(tree, ast.List):
            raise ValueError("the turn is no list of calls")
        return Parsed("", tuple(_python_calls(tree)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        return Parsed("", (), (f"not a list of calls: {error}",))


def _python_calls(tree: ast.List) -> Iterator[Call]:
    for node in tree.elts:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError(f"{ast.unparse(node)} is no call of a tool")
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            raise ValueError(f"{ast.unparse(node)} has arguments without a name")
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        json.dumps(arguments)  # sets, bytes and the like are no arguments of a tool
        yield Call(node.func.id, arguments)


FORMATS: dict[str, Callable[[str], Parsed]] = {
    "hermes": parse_hermes,
    "llama3": parse_llama3,
    "mistral": parse_mistral,
    "pythonic": parse_pythonic,
}
"""The formats by the names that a config gives them."""

_SIGNS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": "<|python_tag|>"}


def sign_of(name: str) -> str:
    """Return what a call of the format ``name`` begins with wherever it stands; empty for a format without such."""
    return _SIGNS.get(name, "")


def format_of(template: str) -> str | None:
    """Return the format that a chat template shows calls in, where it tells; ``pythonic`` is never told."""
    return next((name for name, sign in _SIGNS.items() if sign in template), None)
