"""How weights get from the actor to those who generate or score with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from tandem.base.errors import Problem
from tandem.config.schema import Config
from tandem.plan.parts.placement import Placement
from tandem.plan.parts.preference import learns_preferences

Transport = Literal["shared_memory", "collective"]

KEY = "execution.weight_sync.transport"


def plan_transport(config: Config, placed: Sequence[Placement]) -> Transport:
    """Return the transport of the run; ``auto`` broadcasts where a role has devices on several nodes."""
    chosen = config.execution.weight_sync.transport
    if chosen != "auto":
        return chosen
    several = any(placement.nodes > 1 for placement in placed)
    return "collective" if several and config.execution.mode != "colocate" else "shared_memory"


def check_transport(config: Config, shares: bool, own_loop: bool) -> Iterator[Problem]:
    """Yield why the transport that was written can't act here; ``shares``: the engine has no weights of its own."""
    chosen = config.execution.weight_sync.transport
    if chosen != "auto" and (found := _objection(config, chosen, shares, own_loop)) is not None:
        reason, remedy = found
        yield Problem(KEY, chosen, reason, remedy)


def _objection(config: Config, chosen: str, shares: bool, own_loop: bool) -> tuple[str, str] | None:
    """Return the reason why ``chosen`` can't act, and what to write instead."""
    rollout = config.actor_rollout_ref.rollout.name
    if learns_preferences(config):
        return "nothing is generated, so no new weights travel", "Leave it out"
    if shares:
        reason = f"the engine {rollout} generates with the actor's own parameters, in its process: nothing travels"
        return reason, "Leave it out, or write execution.mode: hybrid"
    if chosen == "shared_memory":
        return None
    if own_loop:
        return "in a loop of your own weights pass through the memory of its machine", "Leave it out"
    if config.execution.mode == "colocate":
        reason = "actor and rollout have the same devices, and a group has one process on each"
        return reason, "Write shared_memory, or execution.mode: hybrid"
    if config.runtime.threads:
        reason = "runtime.threads keeps all roles in one process: there is nobody to broadcast to"
        return reason, "Write shared_memory, or runtime.threads: false"
    return None
