"""Putting ``key=value`` into the tree that a YAML document gave."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from tandem.base.errors import Problem
from tandem.config.arguments import Assignment
from tandem.config.document import DocumentError, parse_yaml
from tandem.config.node import AT_HOME, TypedNode
from tandem.config.schema import Config
from tandem.config.spellings import SPELLINGS
from tandem.config.suggest import unknown_key
from tandem.config.tree import field_at, is_free, is_text


def assign(tree: dict[Any, Any], assignment: Assignment, root: type[BaseModel]) -> list[Problem]:
    """Write the value at its path, making the mappings on the way; gives the problems instead of writing."""
    parts = assignment.path.split(".")
    try:
        value = _value(assignment, root)
    except DocumentError as error:
        return [error.problem]
    spelled = root is Config and assignment.path in SPELLINGS
    if not (spelled or field_at(root, parts) is not None or is_free(root, parts)):
        return [unknown_key(root, tuple(parts), value, tree)]
    here: Any = tree
    for depth, part in enumerate(parts[:-1], 1):
        below = here.get(part)
        if isinstance(below, str) and _is_typed(root, parts[:depth]):
            below = {"type": below}  # `adv_estimator: grpo` gets a parameter
        if below is None:
            below = {}
        if not isinstance(below, dict):
            reason = f"{'.'.join(parts[:depth])} is {below!r}, which has no keys"
            return [Problem(assignment.path, value, reason, "Write a mapping there, or drop this override")]
        here[part] = below
        here = below
    here[parts[-1]] = value
    return []


def as_words(overrides: Sequence[str] | str, keys: Mapping[str, object], root: type[BaseModel]) -> list[str]:
    """Return words of the command line: ``overrides``, where a text is split as a shell does, then one for each of
    ``keys``, whose names are flags, dotted keys or sections. What isn't named in a section given so stays as it is.
    """
    words = shlex.split(overrides) if isinstance(overrides, str) else list(overrides)
    return [
        *words,
        *(f"--{path}={_text(value)}" for name, value in keys.items() for path, value in _flat(root, name, value)),
    ]


def _flat(root: type[BaseModel], path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the keys of a section, of sections inside too; the rest of the config is as it was."""
    known = field_at(root, path.split("."))
    if isinstance(value, Mapping) and known is not None and known.nodes and not _is_typed(root, path.split(".")):
        for key, below in value.items():
            yield from _flat(root, f"{path}.{key}", below)
    else:
        yield path, value


def _text(value: object) -> str:
    """Return a value as the command line would give it."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def two_values(assignments: Sequence[Assignment]) -> list[Problem]:
    """Return a problem for each key that a command line names in two ways with two values; of one way the last word
    wins.
    """
    last: dict[str, dict[str, str]] = {}
    for assignment in assignments:
        last.setdefault(assignment.path, {})[assignment.spelling] = assignment.text
    return [
        Problem(
            path,
            " and ".join(f"{spelling} {text}" for spelling, text in said.items()),
            "two spellings of one key have two values",
            "Keep one of the two",
        )
        for path, said in last.items()
        if len({repr(_read(text, path)) for text in said.values()}) > 1
    ]


def _read(text: str, name: str) -> Any:
    try:
        return parse_yaml(text, name)
    except DocumentError:
        return text


def _value(assignment: Assignment, root: type[BaseModel]) -> Any:
    """Return the text read as YAML, except that a field of text takes any text: a folder named 2024 needs no quotes.

    A path that is empty, as a variable that isn't set leaves it, is no null: that would be the default without a word.
    Nor is what stands behind `` #`` a comment, as in a file: nobody writes one there.
    """
    known = field_at(root, assignment.path.split("."))
    if known is not None and AT_HOME in known.info.metadata and not assignment.text.strip():
        return ""
    free = known is not None and is_text(known.annotation)
    try:
        value = parse_yaml(assignment.text, assignment.path)
    except DocumentError:
        if free:
            return assignment.text
        raise
    written = assignment.text.strip()
    if isinstance(value, str) and " #" in written and written.startswith(value):
        return written
    return value if not free or isinstance(value, str | None) else assignment.text


def _is_typed(root: type[BaseModel], path: list[str]) -> bool:
    known = field_at(root, path)
    return known is not None and any(issubclass(node, TypedNode) for node in known.nodes)
