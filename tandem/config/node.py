"""The base of all config nodes: frozen, strict, unknown keys refused."""

from __future__ import annotations

import errno
import os
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr
from pydantic_core import PydanticCustomError


class Node(BaseModel):
    """A frozen part of the config tree. A string where a number belongs is an error, not a guess."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        populate_by_name=True,
    )


class TypedNode(BaseModel):
    """``{type: NAME, ...parameters}``: a registered entry and its parameters.

    The parameters are checked by the planner against the entry's signature (the signature is the schema).
    """

    model_config = ConfigDict(
        frozen=True, extra="allow", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    type: str
    """The registered name."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything that is written beside ``type``: the parameters of the entry."""
        return dict(self.model_extra or {})


class Whole:
    """The document that a section stands in, for code that is handed only the section.

    All are equal, whatever they refer to: sections are compared by what they say.
    """

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Whole)

    def __hash__(self) -> int:
        return 0


Seconds = Annotated[float, Field(gt=0, le=1e8)]
"""A time limit; what waits for it can't count beyond some hundred years."""
Count = Annotated[int, Field(gt=0, le=1024)]
"""Of processes or threads on one machine."""


class Section(Node):
    """A node that is also handed out alone, to code that builds what it describes."""

    _whole: Whole = PrivateAttr(default_factory=Whole)

    @property
    def root(self) -> Node | None:
        """The whole config that this section belongs to; None for a section made by hand."""
        root: Node | None = self._whole.config
        return root


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Names = Annotated[list[str], BeforeValidator(_as_list)]
"""A list of texts; a single one may be written without brackets."""


LONGEST_NAME = 255
"""Bytes of a file's name that a file system takes."""


def _expanded(value: Any) -> Any:
    if isinstance(value, list):
        return [_place(text) for text in value]
    return value if value is None else _place(value)


def _no_path(reason: str) -> PydanticCustomError:
    return PydanticCustomError("no_path", "{reason}", {"reason": reason})


def _place(text: str) -> str:
    """Return a path with its ``~`` spelled out. Raises an error for what no file can be called, or nobody can
    find.
    """
    path = os.path.expanduser(text)
    if "\0" in path or any("\ud800" <= letter <= "\udfff" for letter in path):
        raise _no_path("no file can be called so: it holds a null byte, or is no text in UTF-8")
    if any(len(part.encode()) > LONGEST_NAME for part in path.split("/")):
        raise _no_path(f"no file can be called so: a name in it has more than {LONGEST_NAME} bytes")
    user = path.partition("/")[0]
    if user.startswith("~") and user != "~" and not os.path.lexists(path):
        raise _no_path(f"there is no user {user[1:]!r} whose home {user} would be")
    if path != path.strip() and not os.path.lexists(path):
        raise _no_path("it begins or ends with white space, and nothing is called so")
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _no_path("it is a link that leads back to itself") from error
    return path


AT_HOME = AfterValidator(_expanded)
"""On paths: a leading ``~`` is the user's home, for whoever reads the config and not for the shell alone.

What no file can be called is refused, before whoever reads it stumbles over it.
"""

Files = Annotated[Names, AT_HOME]
"""Paths; a single one may be written without brackets."""
File = Annotated[str, AT_HOME]
MaybeFile = Annotated[str | None, AT_HOME]
