"""From a validation error to problems: key, value, reason, and what to write instead."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tandem.base.errors import Problem
from tandem.base.registry import near
from tandem.config.document import DocumentError, parse_yaml
from tandem.config.suggest import MODES, Path, at, dotted, unknown_key
from tandem.config.tree import default_text, field_at, members


class Absent:
    """Stands for a value that was not written."""

    def __repr__(self) -> str:
        return "(nothing)"


ABSENT = Absent()

EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
EXAMPLES = {
    "an integer": "1",
    "a number": "0.5",
    "true or false": "true",
    "a text": '"text"',
    "a list": "[...]",
    "a mapping": "{...}",
}
BOUNDS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}


@dataclass(frozen=True)
class Fault:
    """A problem and the place of it in the tree."""

    path: Path
    kind: str
    problem: Problem


def explain(error: ValidationError, tree: dict[Any, Any], root: type[BaseModel]) -> list[Fault]:
    """Return one fault per place; what the members of a union say about one place is merged."""
    found: dict[Path, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        path = _place(detail, tree)
        found.setdefault(path, []).append(detail)
    # Where a mapping was meant as one member of a union, what the other members say of the whole is beside the point.
    inner = {path[:end] for path in found for end in range(len(path))}
    return [
        _fault(path, details, tree, root) for path, details in found.items() if not _beside(path, details, inner, tree)
    ]


def _beside(path: Path, details: list[ErrorDetails], inner: set[Path], tree: Any) -> bool:
    container = isinstance(at(tree, path), Mapping | list)
    return path in inner and container and all(d["type"] in ("string_type", "literal_error") for d in details)


def _place(detail: ErrorDetails, tree: Any) -> Path:
    """Return the location without the names of union members that pydantic puts in."""
    path: list[str | int] = []
    here = tree
    location = [part for part in detail["loc"] if part != "[key]"]
    for index, part in enumerate(location):
        last = index == len(location) - 1
        inside = (isinstance(here, Mapping) and part in here) or (isinstance(here, list) and isinstance(part, int))
        if inside or (last and detail["type"] == "missing"):
            path.append(part)
            here = at(here, (part,))
    if detail["type"] == "union_tag_invalid":
        path.append("mode")
    return tuple(path)


def _fault(path: Path, details: list[ErrorDetails], tree: Any, root: type[BaseModel]) -> Fault:
    first = details[0]
    kind, value = first["type"], at(tree, path)
    key = dotted(path) or "the config"
    if kind == "invalid_key":
        key = ".".join(map(str, path))
    if kind == "extra_forbidden":
        return Fault(path, kind, unknown_key(root, path, value, tree))
    if "[key]" in first["loc"]:
        return Fault(
            path, "extra_forbidden", Problem(key, value, f"unknown role {path[-1]!r}", _choice(first, str(path[-1])))
        )
    if kind == "missing":
        return Fault(path, kind, _missing(key, path, root))
    if kind == "union_tag_invalid":
        reason = f"unknown mode {value!r}"
        return Fault(path, kind, Problem(key, value, reason, _sentence(near(str(value), MODES))))
    reasons, remedies = zip(*(_one(detail, path, value, root) for detail in details), strict=True)
    return Fault(path, kind, Problem(key, value, " and ".join(dict.fromkeys(reasons)), _joined(remedies)))


def _joined(remedies: Iterable[str]) -> str:
    """Return the remedies of a union's members as one sentence; a misspelt choice is what was meant."""
    found = list(dict.fromkeys(remedies))
    if len(found) > 1 and (misspelt := [remedy for remedy in found if remedy.startswith("Did you mean")]):
        return misspelt[0]
    return "; or ".join([*found[:1], *(remedy.removeprefix("Write ") for remedy in found[1:])])


def _one(detail: ErrorDetails, path: Path, value: object, root: type[BaseModel]) -> tuple[str, str]:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in EXPECTED:
        return wrong_type(value, EXPECTED[kind], _default(path, root))
    if kind == "literal_error":
        return "not one of the choices", _choice(detail, value, _choices(path, root))
    if kind in BOUNDS:
        name, sign = BOUNDS[kind]
        return f"must be {sign} {context[name]:.15g}", f"Write a number {sign} {context[name]:.15g}"
    if kind == "finite_number":
        return "not a finite number", "Write a finite number"
    if kind == "string_too_short":
        return "an empty text", f"Write a text, such as {_default(path, root) or 'abc'}"
    if kind in ("too_long", "too_short"):
        return f"has {context['actual_length']} items", f"Write as many as in {_default(path, root) or '[1, 4]'}"
    if kind == "invalid_key":
        return "a key that is not a text", "Write the name of a field"
    if kind == "left_out":
        return detail["msg"], str(context["remedy"])
    if kind == "no_path":
        return detail["msg"], "Write the path of a file or folder"
    message = detail["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:], "See the config reference for what may stand here"


def wrong_type(value: object, expected: str, default: str = "") -> tuple[str, str]:
    """Return the reason and remedy where a value has the wrong type; ``default`` is shown as an example."""
    reason = f"{type_of(value)} where {expected} belongs"
    meant = intended(value, expected)
    if meant is not None:
        return reason, f"Write {_yaml(meant)}" + (" without quotes" if isinstance(value, str) else "")
    if expected == "a list" and isinstance(value, str) and value:
        return reason, f"Write [{value}]"
    if default in ("", "null", '""', "[]") or (expected == "a list" and not default.startswith("[")):
        return reason, f"Write {expected}, such as {EXAMPLES[expected]}"
    return reason, f"Write {expected}, such as {default} (the default)"


def intended(value: object, expected: str) -> object | None:
    """Return what was most likely meant by a value of the wrong type; None where there is no telling."""
    if isinstance(value, str) and expected in ("an integer", "a number", "true or false"):
        try:
            value = parse_yaml(value.strip().lower(), "value")
        except DocumentError:
            return None
        if expected == "true or false" and isinstance(value, bool):
            return value
        if expected == "a number" and isinstance(value, int | float) and not isinstance(value, bool):
            return value
    if expected == "an integer" and isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if math.isfinite(value) and value == int(value) else None
    if expected == "a text" and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return None


def type_of(value: object) -> str:
    """Return the type of a YAML value in words."""
    if value is None:
        return "nothing (null)"
    names = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "a mapping",
    }
    return names.get(type(value), type(value).__name__)


def _yaml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _default(path: Path, root: type[BaseModel]) -> str:
    known = field_at(root, path)
    inside_a_list = isinstance(path[-1], int) if path else True
    return "" if known is None or inside_a_list else default_text(known)


def _missing(key: str, path: Path, root: type[BaseModel]) -> Problem:
    if isinstance(path[-1], int):
        example = _default(path[:-1], root) or "[1, 4]"
        return Problem(dotted(path[:-1]), ABSENT, f"item {path[-1]} is missing", f"Write all items, as in {example}")
    known = field_at(root, path)
    meaning = f": {known.info.description}" if known is not None and known.info.description else ""
    if known is not None and known.nodes:
        required = [name for name, info in known.nodes[0].model_fields.items() if info.is_required()]
        return Problem(key, ABSENT, "required and not written", f"Write {key} with {', '.join(required) or 'its keys'}")
    return Problem(key, ABSENT, f"required and not written{meaning.rstrip('.')}", f"Write {key}=...")


def _choices(path: Path, root: type[BaseModel]) -> list[str]:
    known = field_at(root, path)
    if known is None:
        return []
    return [str(c) for m in members(known.annotation) if get_origin(m) is Literal for c in get_args(m)]


def _choice(detail: ErrorDetails, value: object, choices: list[str] | None = None) -> str:
    listed = choices or [part.strip(" '") for part in detail["ctx"]["expected"].replace(" or ", ",").split(",")]
    hint = near(str(value), listed)
    if hint.startswith("did you mean"):
        return f"{_sentence(hint)} Choices: {', '.join(listed)}"
    return f"Write {listed[0]}" if len(listed) == 1 else f"Write one of {', '.join(listed)}"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
