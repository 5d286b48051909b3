"""The base of all config nodes: frozen, strict, unknown keys refused."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Node(BaseModel):
    """A frozen part of the config tree. A string where a number belongs is an error, not a guess."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, populate_by_name=True
    )


class TypedNode(BaseModel):
    """``{type: NAME, ...parameters}``: a registered entry and its parameters.

    The parameters are checked by the planner against the entry's signature (the signature is the schema).
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, use_attribute_docstrings=True)

    type: str
    """The registered name."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything written beside ``type``."""
        return dict(self.model_extra or {})
