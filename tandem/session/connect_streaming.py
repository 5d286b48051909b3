"""Modes in which every engine generates in a loop of its own: loops and weight sync around what all modes share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from tandem.dataflow.gatekeeper import GateKeeper
from tandem.dataflow.store import DataPlane
from tandem.roles.rollout.utilization import StepClock
from tandem.roles.rollout.worker import OnWeightUpdate, RolloutWorker, UpdatedStream
from tandem.roles.rollout.workers import RolloutWorkers
from tandem.roles.serving import ForwardModel
from tandem.rollout.protocol import RolloutEngine
from tandem.session.parts import Parts
from tandem.session.streaming import StreamingSession
from tandem.session.time_sharing import TimeSharingSession
from tandem.weights.sync import WeightSync

L = TypeVar("L", bound=StreamingSession)


def connect_streaming(parts: Parts) -> StreamingSession:
    """Hybrid: generation goes on while the actor trains."""
    return connect_loops(parts, StreamingSession)


def connect_time_sharing(parts: Parts) -> TimeSharingSession:
    """Colocate with engines that have weights of their own: they and the actor take turns."""
    return connect_loops(parts, TimeSharingSession)


def connect_loops(parts: Parts, kind: type[L], replicas: Sequence[ForwardModel] = (), **handles: Any) -> L:
    """A session of this ``kind``; ``replicas`` get every version of the weights too."""
    execution, fleet = parts.config.execution, parts.runtime.fleet
    staleness = 0
    on_update: OnWeightUpdate = "keep"  # nothing is generated in colocate while weights change
    capacity = execution.data_plane.capacity_groups
    if execution.mode != "colocate":
        staleness, on_update = execution.max_staleness, parts.config.actor_rollout_ref.rollout.on_weight_update
    keeper = GateKeeper(parts.gate(staleness, list(fleet.engines)))
    plane = parts.runtime.plane(parts.ledger(staleness + 1, capacity))
    clock = StepClock()
    make = partial(_stream, parts, plane, keeper, clock)

    def receive(stream: RolloutWorker) -> UpdatedStream:
        return UpdatedStream(stream, keeper, on_update, execution.deadline_s)

    streams = [make(name, engine) for name, engine in fleet.engines.items()]
    rollout_workers = RolloutWorkers(
        streams,
        fleet,
        keeper,
        _weight_sync(parts, keeper, [receive(stream) for stream in streams], replicas),
        restart=lambda name: make(name, parts.runtime.restart(name)),
        receiver=receive,
        max_restarts=execution.max_engine_restarts,
    )
    sub_batches = parts.plan.batch.sub_batches
    handles = {
        "keeper": keeper,
        "rollout_workers": rollout_workers,
        "clock": clock,
        "sub_batches": sub_batches,
        **handles,
    }
    return parts.session(kind, rollout_workers, plane, staleness, **handles)


def _stream(
    parts: Parts, plane: DataPlane, keeper: GateKeeper, clock: StepClock, name: str, engine: RolloutEngine
) -> RolloutWorker:
    return RolloutWorker(
        name,
        engine,
        parts.source,
        parts.rewards,
        plane,
        keeper,
        parts.filling(),
        parts.composite.tokenizer,
        partial=parts.config.actor_rollout_ref.rollout.partial,
        clock=clock,
    )


def _weight_sync(
    parts: Parts, keeper: GateKeeper, receivers: Sequence[UpdatedStream], replicas: Sequence[ForwardModel]
) -> WeightSync:
    """From the actor to the rollout engines, whose versions the gate must know, and to ``replicas``."""
    settings, following = parts.config.execution.weight_sync, {replica.name: replica for replica in replicas}

    def acknowledged(name: str, version: int) -> None:
        if name not in following:
            keeper.acknowledge(name, version)

    return WeightSync(
        parts.runtime.snapshots(parts.composite),
        {**{receiver.name: receiver for receiver in receivers}, **following},
        require_actor=parts.composite.actor.require_actor,
        acknowledged=acknowledged,
        overlap=settings.overlap,
        deadline_s=settings.deadline_s,
        health_s=settings.health_s,
    )
