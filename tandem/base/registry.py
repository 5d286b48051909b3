"""Registries in which the signature is the schema.

In a registered function, positional parameters are *columns* and keyword-only parameters are its YAML parameters. For a
registered class the YAML parameters are those of its constructor, annotated or not. The planner reads both without
running anything.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar

from tandem.base.errors import TandemError, UnknownNameError
from tandem.base.lazy import LazyModule

T = TypeVar("T")


class Scope(IntEnum):
    """The widest set of samples that a computation must see at once (design: what may be pipelined)."""

    TOKEN = 0
    SEQUENCE = 1
    GROUP = 2
    PARTITION = 3


@dataclass(frozen=True)
class Parameter:
    """One YAML parameter of a registered entry. ``required`` means that it has no default.

    ``annotation`` is the type, or its source text where that can't be told without running or importing anything. A
    range stands in it as ``Annotated[float, Field(gt=0)]`` (or pydantic's ``PositiveFloat``); the plan checks it.
    """

    name: str
    default: object
    annotation: object
    required: bool


@dataclass(frozen=True)
class Signature:
    """What an entry needs: ``columns`` it reads (``optional_columns`` may be absent) and its YAML ``parameters``."""

    columns: tuple[str, ...]
    optional_columns: tuple[str, ...]
    parameters: dict[str, Parameter]
    accepts_any: bool


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A registered object with its declared traits."""

    name: str
    target: T
    scope: Scope
    signature: Signature
    summary: str
    traits: dict[str, object]


def near(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for a misspelt name, else the list of what there is."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "known: " + ", ".join(names)


def read_signature(target: Callable[..., Any]) -> Signature:
    """Return the columns and YAML parameters of a function (positional | keyword-only) or of a class (its
    constructor).
    """
    is_class = inspect.isclass(target)
    namespace = _namespace(target)
    columns: list[str] = []
    optional: list[str] = []
    parameters: dict[str, Parameter] = {}
    accepts_any = False
    for p in inspect.signature(target).parameters.values():
        if p.kind is p.VAR_KEYWORD:
            accepts_any = True
        elif p.kind is p.VAR_POSITIONAL:
            continue
        elif is_class or p.kind is p.KEYWORD_ONLY:
            required = p.default is p.empty
            annotation = None if p.annotation is p.empty else resolved(p.annotation, namespace)
            parameters[p.name] = Parameter(p.name, None if required else p.default, annotation, required)
        elif p.default is p.empty:
            columns.append(p.name)
        else:
            optional.append(p.name)
    return Signature(tuple(columns), tuple(optional), parameters, accepts_any)


def _namespace(target: Callable[..., Any]) -> Mapping[str, object]:
    """Return the names that the annotations of a function, or of a class's constructor, are made of."""
    function = getattr(target, "__init__", target) if inspect.isclass(target) else inspect.unwrap(target)
    module = sys.modules.get(getattr(target, "__module__", ""))
    found: Mapping[str, object] = getattr(function, "__globals__", vars(module) if module is not None else {})
    return found


def resolved(annotation: object, namespace: Mapping[str, object]) -> object:
    """Return the type that an annotation's text means, aliases followed; the text itself where a name of it isn't
    there.

    So it stays where it names a module that is imported on first use: reading a signature imports nothing.
    """
    if not isinstance(annotation, str):
        return annotation
    try:
        names = [node.id for node in ast.walk(ast.parse(annotation, mode="eval")) if isinstance(node, ast.Name)]
        if any(isinstance(namespace.get(name), LazyModule) for name in names):
            return annotation
        found = eval(annotation, dict(namespace))
        return resolved(found, namespace) if isinstance(found, str) and found != annotation else found
    except Exception:  # another's annotation: whatever is wrong with it, it is not checked
        return annotation


class Registry(Generic[T]):
    """Names to entries of one kind. A duplicate name raises, an unknown one lists the near ones."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[T]] = {}

    def register(self, name: str, *, scope: Scope = Scope.TOKEN, **traits: object) -> Callable[[T], T]:
        """Return a decorator that adds the object under ``name``. Traits are free facts that the planner may read."""

        def add(target: T) -> T:
            if name in self._entries:
                raise TandemError(f"{self.kind} {name!r} is registered twice: choose another name for the second one")
            doc = inspect.getdoc(target) or ""
            signature = read_signature(target)  # type: ignore[arg-type]
            self._entries[name] = Entry(name, target, scope, signature, doc.split("\n\n")[0], dict(traits))
            return target

        return add

    def remove(self, name: str) -> None:
        """Forget the entry ``name``."""
        del self._entries[name]

    def __getitem__(self, name: str) -> Entry[T]:
        if name not in self._entries:
            raise UnknownNameError(f"unknown {self.kind} {name!r}: {near(name, self._entries)}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def names(self) -> list[str]:
        """Return the names of all entries, sorted."""
        return sorted(self._entries)
