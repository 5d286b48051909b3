"""Whether the actor can be trained by the engine on Megatron-core."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.base.errors import Problem
from tandem.config.schema import Config
from tandem.plan.checks.model.split import ACTOR, SEQUENCE
from tandem.plan.files.model import ModelFacts
from tandem.plan.parts.preference import learns_preferences

STRATEGY = f"{ACTOR}.strategy"


def check_megatron(config: Config, facts: ModelFacts | None) -> Iterator[Problem]:
    """Yield why not, where the config asks for it: heads and the vocabulary are counted with every split model."""
    actor = config.actor_rollout_ref.actor
    if not actor.by_megatron:
        return
    if facts is not None and facts.not_by_megatron is not None:
        yield Problem(STRATEGY, actor.strategy, facts.not_by_megatron, "Write fsdp2, or name another model")
    if config.actor_rollout_ref.model.trains_adapters:
        yield Problem(STRATEGY, actor.strategy, "it trains whole models, no LoRA adapters", "Write fsdp2")
    if learns_preferences(config):
        yield Problem(STRATEGY, actor.strategy, "preferences are learned with another engine", "Write fsdp2")
    if actor.ulysses_sequence_parallel_size > 1:
        reason = "strategy megatron has no context parallelism here: each device sees whole samples"
        remedy = "Write 1, or strategy: fsdp2"
        yield Problem(SEQUENCE, actor.ulysses_sequence_parallel_size, reason, remedy)
