"""Looking at the schema itself: which keys there are, where, of which type, with which default."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tandem.config.node import TypedNode


@dataclass(frozen=True)
class Field:
    """One key of the tree. ``owner`` is the node class in which it is declared.

    ``default`` is what it is where nothing is written: a parent's default may differ from that of the node class.
    ``PydanticUndefined`` where it must be written.
    """

    path: str
    key: str
    owner: type[BaseModel]
    info: FieldInfo
    default: object

    @property
    def annotation(self) -> Any:
        """The type of the field's value, as the node class declares it."""
        return self.info.annotation

    @property
    def nodes(self) -> tuple[type[BaseModel], ...]:
        """The node classes that its value may be; empty for a leaf."""
        return nodes_of(self.annotation)


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type: the members of a union (``Annotated`` peeled off), else the type alone."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return tuple(m for part in get_args(annotation) for m in members(part))
    return (annotation,)


def nodes_of(annotation: Any) -> tuple[type[BaseModel], ...]:
    """Return the node classes among the alternatives of a type."""
    return tuple(m for m in members(annotation) if isinstance(m, type) and issubclass(m, BaseModel))


def is_bool(annotation: Any) -> bool:
    """Return whether the type is a plain switch."""
    return members(annotation) == (bool,)


def is_text(annotation: Any) -> bool:
    """Return whether any text may stand here and nothing else (``null`` apart)."""
    return set(members(annotation)) - {NoneType} == {str}


@functools.cache
def keys_of(node: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the keys of a node as they are written in YAML."""
    return {info.alias or name: info for name, info in node.model_fields.items()}


def walk(root: type[BaseModel], prefix: str = "", instance: BaseModel | None = None) -> Iterator[Field]:
    """Yield all fields below ``root``, in order of declaration; a union gives the keys of every member.

    ``instance``: the node that stands there where nothing is written.
    """
    for name, info in root.model_fields.items():
        key = info.alias or name
        path = f"{prefix}.{key}" if prefix else key
        default = getattr(instance, name) if isinstance(instance, root) else info.get_default()
        field = Field(path, key, root, info, default)
        yield field
        for node in field.nodes:
            yield from walk(node, path, default if isinstance(default, node) else None)


@functools.cache
def paths_of(root: type[BaseModel]) -> dict[str, Field]:
    """Map dotted paths to fields, for everything below ``root``."""
    found: dict[str, Field] = {}
    for field in walk(root):
        found.setdefault(field.path, field)
    return found


def field_at(root: type[BaseModel], path: Sequence[str | int]) -> Field | None:
    """Return the field at ``path``; list positions are skipped. None where the schema has no such key."""
    return paths_of(root).get(".".join(part for part in path if isinstance(part, str)))


def is_free(root: type[BaseModel], path: Sequence[str | int]) -> bool:
    """Return whether ``path`` lies inside something whose keys the schema leaves open (a typed node, a plain dict)."""
    for end in range(len(path) - 1, 0, -1):
        field = field_at(root, path[:end])
        if field is not None:
            # All of a typed node's own fields are in the tree, so what is not there is a parameter.
            open_node = any(issubclass(node, TypedNode) for node in field.nodes)
            return open_node or any(get_origin(m) is dict for m in members(field.annotation))
    return False


def default_text(field: Field) -> str:
    """Return the default as YAML would write it; empty for a key that must be written."""
    return "" if field.default is PydanticUndefined else plain(field.default)


def plain(value: object) -> str:
    """Return a value as YAML writes it on one line."""
    if isinstance(value, BaseModel):
        shown = {"type"} if isinstance(value, TypedNode) else value.model_fields_set
        changed = {key: getattr(value, key) for key in type(value).model_fields if key in shown}
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


BOUNDS = {Gt: ("gt", ">"), Ge: ("ge", ">="), Lt: ("lt", "<"), Le: ("le", "<=")}


def type_text(annotation: Any, metadata: Sequence[object] = ()) -> str:
    """Return the type in words, with the bounds of a number."""
    if get_origin(annotation) is Annotated:
        annotation, *inside = get_args(annotation)
        return type_text(annotation, (*metadata, *inside))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(dict.fromkeys(type_text(part, metadata) for part in get_args(annotation)))
    bounds = [
        _bound(part)
        for constraint in metadata
        for part in _parts(constraint)
        if annotation in (int, float) and type(part) in BOUNDS
    ]
    return " ".join([_one_type(annotation), *" and ".join(bounds).split()])


def _parts(constraint: object) -> Sequence[object]:
    """Return the bounds in a constraint, of which pydantic's fields hold several."""
    if isinstance(constraint, FieldInfo):
        return constraint.metadata
    return tuple(constraint) if isinstance(constraint, GroupedMetadata) else (constraint,)


def _bound(constraint: Any) -> str:
    name, sign = BOUNDS[type(constraint)]
    return f"{sign} {getattr(constraint, name)}"


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
    return "{type: NAME, ...}" if issubclass(annotation, TypedNode) else "mapping"
