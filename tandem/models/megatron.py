"""Which models the training engine on Megatron-core knows, by their ``config.json``. No torch: the plan asks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMED = frozenset({"llama", "qwen2", "qwen3"})
"""Families whose weights have names in Megatron-core: ``tandem.train.megatron.names``."""

_ROPES = frozenset({"default", "llama3", "linear"})
"""Kinds of rotary positions that are a frequency for each pair of numbers, whatever the length."""


def fault_for_megatron(config: Mapping[str, Any]) -> str | None:
    """Return why a model of this ``config.json`` can't be trained with strategy megatron; None where it can."""
    family = config.get("model_type")
    if family not in NAMED:
        known = ", ".join(sorted(NAMED))
        return f"which weight of a model of the family {family} is which in Megatron-core is not known ({known} are)"
    for key, value in _other_than_plain(config):
        return f"its config.json says {key}: {value}, and how that runs in Megatron-core is not known"
    return None


def _other_than_plain(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the keys that make a model another one than is built."""
    found = [(key, True) for key in ("attention_bias", "mlp_bias", "use_sliding_window") if config.get(key)]
    if config.get("hidden_act", "silu") != "silu":
        found.append(("hidden_act", config["hidden_act"]))
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if isinstance(rope, Mapping):
            kind = rope.get("rope_type", rope.get("type", "default"))
            found += [] if kind in _ROPES else [(f"{key}.rope_type", kind)]
    return found
