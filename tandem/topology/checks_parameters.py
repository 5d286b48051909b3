"""Parameters of typed nodes against the signature of what they name."""

from __future__ import annotations

import ast
import builtins
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tandem.base.errors import Problem
from tandem.base.registry import Parameter, Signature, near
from tandem.config.explain import EXPECTED, type_of, wrong_type

PLAIN = {"int", "float", "bool", "str", "list", "dict", "tuple"}


def check_parameters(
    key: str, kind: str, name: str, written: Mapping[str, Any], signature: Signature, own: Sequence[str] = ("type",)
) -> Iterator[Problem]:
    """Unknown, missing and wrongly typed parameters of ``{type: name, ...written}`` at ``key``.

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


def check_type(key: str, value: Any, parameter: Parameter) -> Iterator[Problem]:
    """Whether a value fits the annotation, as far as that is made of plain types; anything else is not judged."""
    annotation = readable(parameter.annotation)
    if annotation is None:
        return
    try:
        TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        default = "" if parameter.required else str(parameter.default)
        if first["type"] in EXPECTED and len(first["loc"]) <= 1:
            reason, remedy = wrong_type(value, EXPECTED[first["type"]], default if default != "None" else "")
        elif first["type"] == "literal_error":
            choices = [str(choice) for choice in typing.get_args(annotation)]
            reason, remedy = "not one of the choices", near(str(value), choices)
            remedy = remedy[0].upper() + remedy[1:]
        else:
            message = first["msg"]
            reason, remedy = (
                f"{type_of(value)}: {message[0].lower()}{message[1:]}",
                f"Write {spelled(parameter.annotation)}",
            )
        yield Problem(key, value, reason, remedy)


def spelled(annotation: object) -> str:
    """The annotation as its source writes it."""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def readable(annotation: object) -> Any:
    """The type that an annotation means, if it is made of plain types; None if it isn't or there is none.

    Annotations come as text (postponed evaluation, or source that is not run), and evaluating one could import torch.
    """
    if annotation is None:
        return None
    try:
        node = ast.parse(spelled(annotation), mode="eval").body
    except SyntaxError:
        return None
    return _type_of_node(node)


def _type_of_node(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in PLAIN:
        return getattr(builtins, node.id)
    if isinstance(node, ast.Constant) and node.value is None:
        return type(None)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        left, right = _type_of_node(node.left), _type_of_node(node.right)
        return None if left is None or right is None else left | right
    if isinstance(node, ast.Subscript):
        return _type_of_subscript(ast.unparse(node.value).rpartition(".")[2], node.slice)
    return None


def _type_of_subscript(name: str, inside: ast.expr) -> Any:
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if name == "Literal" and all(isinstance(part, ast.Constant) for part in parts):
        return typing.Literal[tuple(part.value for part in parts if isinstance(part, ast.Constant))]
    types = [_type_of_node(part) for part in parts]
    if any(found is None for found in types):
        return None
    if name == "Optional":
        return types[0] | None
    if name in ("list", "List", "Sequence") and len(types) == 1:
        return list.__class_getitem__(types[0])
    if name in ("dict", "Dict", "Mapping") and len(types) == 2:
        return dict.__class_getitem__((types[0], types[1]))
    return None
