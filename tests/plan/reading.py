"""Which keys of a config are read while something runs: attribute access is watched, copies of sections included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel

from tandem.config.node import Node, TypedNode


@contextmanager
def watched(config: BaseModel) -> Iterator[set[str]]:
    """The dotted keys that are read inside the block, sections themselves left out."""
    found: set[str] = set()
    places: dict[int, tuple[BaseModel, str]] = {}

    def register(node: BaseModel, path: str) -> None:
        places[id(node)] = (node, path)
        for name, info in type(node).model_fields.items():
            below = node.__dict__.get(name)
            key = f"{path}.{info.alias or name}".removeprefix(".")
            for index, item in enumerate(below if isinstance(below, list) else [below]):
                if isinstance(item, Node | TypedNode):
                    register(item, f"{key}[{index}]" if isinstance(below, list) else key)

    def reading(node: Any, name: str) -> Any:
        value = BaseModel.__getattribute__(node, name)
        if name in type(node).model_fields and id(node) in places and not isinstance(value, Node | TypedNode):
            info, path = type(node).model_fields[name], places[id(node)][1]
            found.add(f"{path}.{info.alias or name}".removeprefix("."))
        return value

    def copying(node: Any, **changes: Any) -> Any:
        copy = BaseModel.model_copy(node, **changes)
        if id(node) in places:
            register(copy, places[id(node)][1])
        return copy

    register(config, "")
    try:
        for kind in (Node, TypedNode):
            kind.__getattribute__, kind.model_copy = reading, copying  # type: ignore[method-assign,assignment]
        yield found
    finally:
        for kind in (Node, TypedNode):
            del kind.__getattribute__, kind.model_copy
