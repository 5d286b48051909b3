"""How long a document may be, by a model's config. Importing this costs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""What configs call the longest document that a model is made for."""


@dataclass(frozen=True)
class Context:
    """The longest document: ``tokens``, and ``why``."""

    tokens: int
    why: str

    @classmethod
    def of(cls, text_config: Mapping[str, Any]) -> Context | None:
        """Return the context that a ``config.json``, or its part about text, tells of; None where nothing ends it.

        There are kinds of rope whose factor follows the longest position that is computed with it. Beyond the length up
        to which it stands still, a document would get what depends on its neighbours, and tokens that are generated
        another factor than those before them: there it ends.
        """
        found = (text_config.get(name) for name in _CONTEXT)
        named = next((value for value in found if isinstance(value, int) and value > 0), None)
        limits = [
            cls(limit, f"the factor of the model's rope ({kind}) stands still for {limit} tokens, and moves beyond")
            for kind, limit in _moving(text_config)
        ]
        limits += [cls(named, f"the model's context is {named}")] if named else []
        return min(limits, key=lambda limit: limit.tokens, default=None)


def _moving(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield each kind of rope that moves, and up to where it stands still."""
    for rope in ropes(config):
        kind = str(rope.get("rope_type") or rope.get("type") or "")
        limit = config.get("max_position_embeddings")
        if kind in ("longrope", "su"):
            name = "original_max_position_embeddings"
            limit = rope.get(name) or config.get(name) or limit
        elif "dynamic" not in kind:
            continue
        if isinstance(limit, int) and limit > 0:
            yield kind, limit


def ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of each rope: one for all layers, or one for each kind of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key)
        if isinstance(found, Mapping):
            yield found
            yield from (part for part in found.values() if isinstance(part, Mapping))
