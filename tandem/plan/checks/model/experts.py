"""Contradictions of what is asked of the routers of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.base.errors import Problem
from tandem.config.schema import Config
from tandem.models.families import ROUTED
from tandem.plan.files.model import ModelFacts
from tandem.plan.parts.engine import after_swap, engine_capabilities
from tandem.plan.parts.preference import learns_preferences

ACTOR = "actor_rollout_ref.actor"
BALANCE, REPLAY = f"{ACTOR}.router_aux_loss_coef", f"{ACTOR}.router_replay"


def check_experts(config: Config, facts: ModelFacts | None) -> Iterator[Problem]:
    """Yield why the routers of the actor's model can't be balanced or replayed as the config says."""
    actor = config.actor_rollout_ref.actor
    if actor.router_aux_loss_coef:
        yield from _check_routers(BALANCE, actor.router_aux_loss_coef, config, facts)
    if actor.router_replay:
        yield from _check_routers(REPLAY, True, config, facts)
        if not learns_preferences(config):
            yield from _check_engines(config)


def _check_routers(key: str, value: object, config: Config, facts: ModelFacts | None) -> Iterator[Problem]:
    """Yield what keeps the routers of the actor's model from being known."""
    actor = config.actor_rollout_ref.actor
    if facts is not None and not {*facts.families} & {*ROUTED}:
        family = facts.families[0] if facts.families else "unknown"
        has = "a router that is not known" if facts.routed else "no router"
        reason = f"a model of the family {family} has {has} (known are those of {', '.join(sorted(ROUTED))})"
        yield Problem(key, value, reason, "Leave it out")
    elif actor.by_megatron:
        reason = "strategy megatron trains models without experts only"
        yield Problem(key, value, reason, "Leave it out, or write strategy: fsdp2")
    elif actor.ulysses_sequence_parallel_size > 1:
        reason = f"ulysses_sequence_parallel_size {actor.ulysses_sequence_parallel_size} gives a router parts of rows"
        yield Problem(key, value, reason, "Leave it out, or write ulysses_sequence_parallel_size: 1")


def _check_engines(config: Config) -> Iterator[Problem]:
    named = {one.actor_rollout_ref.rollout.name: engine_capabilities(one) for one in (config, after_swap(config))}
    for name, capabilities in named.items():
        if not capabilities.routes:
            reason = f"the engine {name} does not tell which experts it sent a token to"
            remedy = "Write rollout.name: hf, or leave it out; or declare routes=True where the engine is registered"
            yield Problem(REPLAY, True, reason, remedy)
