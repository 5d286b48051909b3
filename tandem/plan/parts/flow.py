"""How samples and weights flow between the roles: what a mode and its keys come to, decided once. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.config.model import OnWeightUpdate
from tandem.config.schema import Config

Pipelining = Literal["off", "accumulate", "step"]


@dataclass(frozen=True)
class Flow:
    """What a run asks instead of its mode.

    A partition arrives in ``sub_batches`` parts, at most ``staleness`` versions old. ``on_weight_update`` is what
    becomes of a generation that new weights meet. ``pipelining``: whether parts are trained as they arrive.
    ``balance``: ranks get rows by their tokens. ``apart``: every role has weights and a loop of its own.
    ``offload_train`` and ``offload_rollout``: what actor and engine give up on their devices in each other's turn.
    """

    sub_batches: int
    staleness: int
    on_weight_update: OnWeightUpdate
    pipelining: Pipelining
    balance: bool
    apart: bool
    offload_train: bool = False
    offload_rollout: bool = False

    @property
    def old_actor(self) -> bool:
        """Whether the actor moves before the last forward of a step, so that the weights of its start are kept."""
        return self.pipelining == "step"


def plan_flow(config: Config) -> Flow:
    """Return the flow of the config's mode."""
    execution, on_update = config.execution, config.actor_rollout_ref.rollout.on_weight_update
    if execution.mode == "colocate":  # nothing is generated while weights change
        section = config.actor_rollout_ref
        train, rollout = section.actor.offload is not False, section.rollout.offload is not False
        return Flow(1, 0, "keep", "off", execution.balance_data, False, offload_train=train, offload_rollout=rollout)
    parts, staleness = execution.num_iters_per_train_update, execution.max_staleness
    if execution.mode == "hybrid":
        return Flow(parts, staleness, on_update, execution.train_pipelining, execution.balance_data, apart=False)
    return Flow(parts, staleness, on_update, "off", balance=False, apart=True)
