"""Parameters of typed nodes against the signature of what they name."""

from __future__ import annotations

import ast
import contextlib
import functools
import operator
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import ErrorDetails

from tandem.base.errors import Problem
from tandem.base.ranges import Fraction, InnerFraction
from tandem.base.registry import Parameter, Signature, near
from tandem.config.explain import BOUNDS, EXPECTED, type_of, wrong_type
from tandem.config.tree import type_text

NAMED: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, bool, str, list, dict, tuple)},
    "PositiveInt": PositiveInt,
    "NonNegativeInt": NonNegativeInt,
    "PositiveFloat": PositiveFloat,
    "NonNegativeFloat": NonNegativeFloat,
    "Fraction": Fraction,
    "InnerFraction": InnerFraction,
}
"""Types that an annotation in unread source may name."""

COLDEST = 0.01
"""The lowest temperature that samples: logits a hundred times as far apart leave one token."""

UNIONS = (typing.Union, types.UnionType)
CONTAINERS = {"list": list, "List": list, "Sequence": list, "dict": dict, "Dict": dict, "Mapping": dict}


def check_parameters(
    key: str, kind: str, name: str, written: Mapping[str, Any], signature: Signature, own: Sequence[str] = ("type",)
) -> Iterator[Problem]:
    """Yield unknown, missing and wrongly typed parameters of ``{type: name, ...written}`` at ``key``.

    ``own`` are the keys that are no parameters.
    """
    known = signature.parameters
    for parameter, value in written.items():
        if parameter in known:
            yield from check_type(f"{key}.{parameter}", value, known[parameter])
        elif not signature.accepts_any:
            hint = near(parameter, [*known, *own])
            if not hint.startswith("did you mean"):
                hint = near(parameter, known) if known else "it takes none"
            reason = f"{kind} {name!r} has no parameter {parameter!r}"
            yield Problem(f"{key}.{parameter}", value, reason, hint[0].upper() + hint[1:])
    for declared in known.values():
        if declared.required and declared.name not in written:
            reason = f"{kind} {name!r} needs this parameter"
            yield Problem(f"{key}.{declared.name}", None, reason, f"Write {key}.{declared.name}=...")


def is_number(value: object) -> TypeGuard[float]:
    """Return a number as YAML means it: true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_type(key: str, value: Any, parameter: Parameter) -> Iterator[Problem]:
    """Check whether a value fits the annotation and its range, as far as that is made of plain types; else nothing is
    said.

    A range with a ``description`` (``Annotated[float, Field(gt=1, description="...")]``) has it as its reason.
    """
    annotation = readable(parameter.annotation)
    if annotation is None:
        return
    try:
        TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        yield _misfit(key, value, parameter, annotation, error.errors(include_url=False)[0])


def _misfit(key: str, value: Any, parameter: Parameter, annotation: Any, first: ErrorDetails) -> Problem:
    """Return the problem that the first error of a validation makes; inside a list it names the item."""
    words, default = type_text(annotation), "" if parameter.default is None else str(parameter.default)
    for index in (part for part in first["loc"] if isinstance(part, int)):
        key, value, default = f"{key}[{index}]", value[index], ""
        words = words.removeprefix("list of ").removesuffix(" or null")
    example = f", such as {default} (the default)" if default else ""
    if first["type"] in EXPECTED and (len(first["loc"]) <= 1 or not default):
        return Problem(key, value, *wrong_type(value, EXPECTED[first["type"]], default))
    if first["type"] == "literal_error":
        remedy = near(str(value), [str(choice) for choice in choices_of(annotation)])
        return Problem(key, value, "not one of the choices", remedy[0].upper() + remedy[1:])
    if first["type"] == "finite_number":
        return Problem(key, value, "not a finite number", f"Write a finite number{example}")
    if first["type"] in BOUNDS:
        bound, sign = BOUNDS[first["type"]]
        reason = ": ".join([f"must be {sign} {first['ctx'][bound]:g}", *meanings(annotation)])
        return Problem(key, value, reason, f"Write {with_article(words)}{example}")
    message = first["msg"]
    return Problem(key, value, f"{type_of(value)}: {message[0].lower()}{message[1:]}", f"Write {spelled(annotation)}")


def with_article(words: str) -> str:
    """Return the words with their article: ``a number``, ``an integer``."""
    return f"{'an' if words.startswith('integer') else 'a'} {words}"


def choices_of(annotation: Any) -> tuple[object, ...]:
    """Return what the ``Literal`` in an annotation offers."""
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    return tuple(choice for part in typing.get_args(annotation) for choice in choices_of(part))


def meanings(annotation: Any) -> Iterator[str]:
    """Yield the descriptions of the ranges in an annotation."""
    if typing.get_origin(annotation) is typing.Annotated:
        yield from (d for m in annotation.__metadata__ if isinstance(d := getattr(m, "description", None), str))
        annotation = annotation.__origin__
    for part in typing.get_args(annotation):
        yield from meanings(part)


def spelled(annotation: object) -> str:
    """Return the annotation as its source writes it, with the bounds of a range."""
    if isinstance(annotation, str):
        return annotation
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return spelled(parts[0]) + type_text(annotation).removeprefix(type_text(parts[0]))
    if origin in UNIONS:
        return " | ".join(map(spelled, parts))
    if annotation is type(None):
        return "None"
    if origin is typing.Literal or origin is None:
        return getattr(annotation, "__name__", str(annotation)) if origin is None else f"Literal{list(parts)}"
    return f"{getattr(origin, '__name__', origin)}[{', '.join(map(spelled, parts))}]"


def readable(annotation: object) -> Any:
    """Return the type that an annotation means, if it is made of plain types; None if it isn't or there is none.

    Text (source that is not run, a name of a module that isn't imported) is parsed and never evaluated.
    """
    if annotation is None:
        return None
    if not isinstance(annotation, str):
        return _plain_type(annotation)
    try:
        node = ast.parse(annotation, mode="eval").body
    except SyntaxError:
        return None
    return _type_of_node(node)


def _plain_type(annotation: Any) -> Any:
    """Return the type itself, with sequences as lists and mappings as dicts, as YAML gives them."""
    annotation = getattr(annotation, "__value__", annotation)  # of a ``type`` statement
    if annotation in NAMED.values() or annotation is type(None):
        return annotation
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return annotation
    if origin is typing.Annotated:
        inner = _plain_type(parts[0])
        return None if inner is None else typing.Annotated[inner, *parts[1:]]
    return _composed(origin, [_plain_type(part) for part in parts])


def _composed(origin: object, types: list[Any]) -> Any:
    if not types or any(found is None for found in types):
        return None
    if origin in UNIONS:
        return functools.reduce(operator.or_, types)
    if origin in (list, Sequence) and len(types) == 1:
        return list.__class_getitem__(types[0])
    if origin in (dict, Mapping) and len(types) == 2:
        return dict.__class_getitem__((types[0], types[1]))
    return None


def _type_of_node(node: ast.expr) -> Any:
    if isinstance(node, ast.Name | ast.Attribute):
        return NAMED.get(ast.unparse(node).rpartition(".")[2])
    if isinstance(node, ast.Constant) and node.value is None:
        return type(None)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _composed(typing.Union, [_type_of_node(node.left), _type_of_node(node.right)])
    if isinstance(node, ast.Subscript):
        return _type_of_subscript(ast.unparse(node.value).rpartition(".")[2], node.slice)
    return None


def _type_of_subscript(name: str, inside: ast.expr) -> Any:
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if name == "Literal" and all(isinstance(part, ast.Constant) for part in parts):
        return typing.Literal[tuple(part.value for part in parts if isinstance(part, ast.Constant))]
    if name == "Annotated":
        inner, field = _type_of_node(parts[0]), Field(**dict(b for part in parts[1:] for b in _bounds_of_node(part)))
        return None if inner is None else typing.Annotated[inner, field]
    types = [_type_of_node(part) for part in parts]
    if name == "Optional":
        return _composed(typing.Union, [*types, type(None)])
    return _composed(CONTAINERS.get(name), types)


def _bounds_of_node(node: ast.expr) -> Iterator[tuple[str, Any]]:
    """Yield the bounds and the description in ``Field(...)``, ``Gt(...)`` and their like, as far as they are
    literals.
    """
    if not isinstance(node, ast.Call):
        return
    name = ast.unparse(node.func).rpartition(".")[2].lower()
    given = [(keyword.arg, keyword.value) for keyword in node.keywords] + [(name, part) for part in node.args[:1]]
    for key, part in given:
        if key in ("gt", "ge", "lt", "le", "description"):
            with contextlib.suppress(ValueError):
                yield key, ast.literal_eval(part)
