"""Looking at the schema itself: which keys there are, where, of which type, with which default."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tandem.config.node import TypedNode


@dataclass(frozen=True)
class Field:
    """One key of the tree. ``owner`` is the node class in which it is declared."""

    path: str
    key: str
    owner: type[BaseModel]
    info: FieldInfo

    @property
    def annotation(self) -> Any:
        """Its type."""
        return self.info.annotation

    @property
    def nodes(self) -> tuple[type[BaseModel], ...]:
        """The node classes that its value may be; empty for a leaf."""
        return nodes_of(self.annotation)


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type: the members of a union (``Annotated`` peeled off), else the type alone."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return tuple(m for part in get_args(annotation) for m in members(part))
    return (annotation,)


def nodes_of(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The node classes among the alternatives of a type."""
    return tuple(m for m in members(annotation) if isinstance(m, type) and issubclass(m, BaseModel))


def is_bool(annotation: Any) -> bool:
    """Whether the type is a plain switch."""
    return members(annotation) == (bool,)


def is_text(annotation: Any) -> bool:
    """Whether any text may stand here and nothing else (``null`` apart)."""
    return set(members(annotation)) - {NoneType} == {str}


@functools.cache
def keys_of(node: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a node as they are written in YAML."""
    return {info.alias or name: info for name, info in node.model_fields.items()}


def walk(root: type[BaseModel], prefix: str = "") -> Iterator[Field]:
    """All fields below ``root``, in order of declaration; a union gives the keys of every member."""
    for key, info in keys_of(root).items():
        path = f"{prefix}.{key}" if prefix else key
        field = Field(path, key, root, info)
        yield field
        for node in field.nodes:
            yield from walk(node, path)


@functools.cache
def paths_of(root: type[BaseModel]) -> dict[str, Field]:
    """Dotted path -> field, for everything below ``root``."""
    found: dict[str, Field] = {}
    for field in walk(root):
        found.setdefault(field.path, field)
    return found


def field_at(root: type[BaseModel], path: Sequence[str | int]) -> Field | None:
    """The field at ``path``; list positions are skipped. None where the schema has no such key."""
    return paths_of(root).get(".".join(part for part in path if isinstance(part, str)))


def is_free(root: type[BaseModel], path: Sequence[str | int]) -> bool:
    """Whether ``path`` lies inside something whose keys the schema leaves open (a typed node, a plain dict)."""
    for end in range(len(path) - 1, 0, -1):
        field = field_at(root, path[:end])
        if field is not None:
            # All of a typed node's own fields are in the tree, so what is not there is a parameter.
            open_node = any(issubclass(node, TypedNode) for node in field.nodes)
            return open_node or any(get_origin(m) is dict for m in members(field.annotation))
    return False


def default_text(info: FieldInfo) -> str:
    """The default as YAML would write it; empty for a required field."""
    if info.is_required():
        return ""
    return plain(info.get_default(call_default_factory=True))


def plain(value: object) -> str:
    """A value as YAML writes it on one line."""
    if isinstance(value, BaseModel):
        changed = {key: getattr(value, key) for key in type(value).model_fields if key in value.model_fields_set}
        return (
            "{"
            + ", ".join(f"{key}: {plain(part)}" for key, part in (changed | (value.model_extra or {})).items())
            + "}"
        )
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(plain(part) for part in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{plain(key)}: {plain(part)}" for key, part in value.items()) + "}"
    return str(value) if value != "" else '""'


def type_text(annotation: Any) -> str:
    """The type in words."""
    return " or ".join(dict.fromkeys(_one_type(m) for m in members(annotation)))


def _one_type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin is list:
        return f"list of {type_text(arguments[0])}"
    if origin is tuple:
        return "[" + ", ".join(type_text(part) for part in arguments) + "]"
    if origin is dict:
        return f"{{{type_text(arguments[0])}: {type_text(arguments[1])}}}"
    words = {int: "integer", float: "number", str: "text", bool: "true or false", NoneType: "null", Any: "anything"}
    if annotation in words:
        return words[annotation]
    if issubclass(annotation, TypedNode):
        return "{type: NAME, ...}"
    return "mapping"
