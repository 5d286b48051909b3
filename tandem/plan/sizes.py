"""What a ``config.json`` says of a model that none can have: it is found without loading one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "n_embd",
    "n_head",
    "n_layer",
    "n_positions",
)
"""Fields that are 1 or more where they are numbers; some families have one for each layer, or none."""


def fault_of_sizes(config: Mapping[str, Any]) -> str | None:
    """Return why no model has the sizes of its ``config.json``, or of the part about text; None where one may."""
    for name in _SIZES:
        value = config.get(name)
        if isinstance(value, (str, bool, float)) or (isinstance(value, int) and value < 1):
            return f"its config.json has the {name} {value!r}, which is no whole number of 1 or more"
    window = config.get("sliding_window")
    if isinstance(window, (str, float)) or (isinstance(window, int) and window < 0):
        return f"its config.json has the sliding_window {window!r}, which is no whole number of 0 or more"
    return _fault_of_heads(config)


def _fault_of_heads(config: Mapping[str, Any]) -> str | None:
    """Return which heads have no whole width or share no whole number of keys; None where all is whole."""
    hidden, heads, shared = (config.get(name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if not isinstance(heads, int):
        return None
    if isinstance(shared, int) and heads % shared:
        return f"its config.json has {heads} num_attention_heads, which {shared} num_key_value_heads can't be shared by"
    width = any("head_dim" in name and value is not None for name, value in config.items())
    if isinstance(hidden, int) and hidden % heads and not width:
        return f"its config.json has no head_dim, and a hidden_size of {hidden} has no {heads} equal heads"
    return None
