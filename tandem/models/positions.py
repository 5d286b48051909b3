"""How long a document may be, by a model's config. Importing this costs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""What configs call the longest document that a model is made for."""


def context(text_config: Mapping[str, Any]) -> int | None:
    """The longest document by the ``text_config`` (fields of a ``config.json``); None where nothing ends it."""
    found = [text_config[key] for key in CONTEXT_KEYS if isinstance(text_config.get(key), int) and text_config[key] > 0]
    limits = [limit for _, limit in _moving(text_config)]
    return min([*found[:1], *limits], default=None)


def moving_rope(text_config: Mapping[str, Any]) -> tuple[str, int] | None:
    """The kind of rope whose factor follows the longest position, and up to how many tokens it stands still.

    Beyond that, what a document gets depends on what stands beside it, and tokens that were generated before keep
    another factor than those after: no longer document has one right answer. None for other kinds.
    """
    return min(_moving(text_config), key=lambda found: found[1], default=None)


def _moving(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for rope in _ropes(config):
        kind = str(rope.get("rope_type") or rope.get("type") or "")
        if "dynamic" not in kind and kind not in ("longrope", "su"):
            continue
        original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        limit = original or config.get("max_position_embeddings")
        if isinstance(limit, int) and limit > 0:
            yield kind, limit


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parameters of each rope: one for all layers, or one for each kind of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key)
        if isinstance(found, Mapping):
            yield found
            yield from (part for part in found.values() if isinstance(part, Mapping))
