"""Whether a model can be split over devices: ``actor.tensor_model_parallel_size``."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.base.errors import Problem
from tandem.config.schema import Config
from tandem.models.families import SPLIT
from tandem.plan.model import ModelFacts

KEY = "actor_rollout_ref.actor.tensor_model_parallel_size"


def check_split(config: Config, facts: ModelFacts | None) -> Iterator[Problem]:
    """Yield why the actor's model can't be split over as many devices as the config says."""
    width, model = config.actor_rollout_ref.actor.tensor_model_parallel_size, config.actor_rollout_ref.model
    if width == 1:
        return
    whole = "Write 1: parameters are sharded over all devices of the actor anyway"
    if model.trains_adapters:
        yield Problem(KEY, width, "a model with LoRA adapters can't be split over devices", whole)
    if facts is None:
        return
    for family in facts.families:
        if family not in SPLIT:
            reason = f"how a model of the family {family} is split over devices is not known ({_known()} are)"
            yield Problem(KEY, width, reason, whole)
            return
    counts = {
        "attention heads": facts.heads,
        "heads of keys and values": facts.kv_heads,
        "columns of the MLP": facts.inside,
        "rows of the embedding": facts.vocabulary,
    }
    for what, count in counts.items():
        if count is not None and count % width:
            reason = f"{count} {what} can't be split evenly over {width} devices"
            yield Problem(KEY, width, reason, f"Write a divisor of {count}")


def _known() -> str:
    return ", ".join(sorted(SPLIT))
