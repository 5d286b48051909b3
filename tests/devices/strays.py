"""A rollout engine that computes on another device than it is told, as one that asks nobody does."""

from __future__ import annotations

from tandem.models.causal_lm import CausalLM
from tandem.rollout.capabilities import ANY_DEVICE, EngineCapabilities
from tandem.rollout.hf import HfEngine
from tandem.rollout.registry import register_engine


@register_engine("strays", capabilities=EngineCapabilities(weights=("own",), devices=(ANY_DEVICE,)))
def strays(model: CausalLM, *, version: int) -> HfEngine:
    return HfEngine(model.to("cpu"), version=version)
