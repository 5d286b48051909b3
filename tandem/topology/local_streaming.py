"""The local runtime of the streaming modes: the engine in a process of its own, its loop in a thread of this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from tandem.config.schema import Config
from tandem.dataflow.gatekeeper import GateKeeper
from tandem.roles.rollout_stream import StreamingRollout, UpdatedStream
from tandem.roles.serving import ForwardModel
from tandem.rollout.host import build_engine
from tandem.rollout.process import ProcessEngine
from tandem.rollout.protocol import RolloutEngine
from tandem.topology.copies import engine_spec
from tandem.topology.parts import ENGINE, Parts
from tandem.topology.plan_adapters import pushed_part
from tandem.topology.session import Session
from tandem.topology.streaming import StreamingSession
from tandem.weights.sync import SharedSnapshots, WeightSync


def connect_streaming(parts: Parts, followers: Sequence[ForwardModel] = ()) -> StreamingSession:
    """Engine, loop and weight sync around the parts that all modes share; ``followers`` get every version too."""
    config, execution = parts.config, parts.config.execution
    assert execution.mode != "colocate"
    engine, close = _engine(config)
    keeper = GateKeeper(parts.gate(execution.max_staleness))
    plane = parts.plane(execution.max_staleness + 1, execution.data_plane.capacity_groups)
    rollout = config.actor_rollout_ref.rollout
    stream = StreamingRollout(
        ENGINE,
        engine,
        parts.source,
        parts.rewards,
        plane,
        keeper,
        parts.filling(),
        parts.composite.tokenizer,
        partial=rollout.partial,
    )
    receiver = UpdatedStream(stream, keeper, rollout.on_weight_update, execution.deadline_s)
    return StreamingSession(
        **_fields(parts.session(stream, plane, execution.max_staleness)),
        keeper=keeper,
        streams=(stream,),
        publisher=_weight_sync(parts, keeper, receiver, followers),
        sub_batches=parts.plan.batch.sub_batches,
        closers=(close,),
    )


def _engine(config: Config) -> tuple[RolloutEngine, Callable[[], None]]:
    """The rollout engine, and what ends it. ``runtime.threads`` keeps it in this process, for a debugger."""
    spec, execution = engine_spec(config), config.execution
    if config.runtime.threads:
        return build_engine(spec), _nothing
    bucket_bytes = execution.weight_sync.bucket_mb << 20
    hosted = ProcessEngine(ENGINE, spec, deadline_s=execution.deadline_s, bucket_bytes=bucket_bytes)
    return hosted, hosted.close


def _weight_sync(
    parts: Parts, keeper: GateKeeper, receiver: UpdatedStream, followers: Sequence[ForwardModel]
) -> WeightSync:
    """From the actor to the rollout engine, whose version the gate must know, and to ``followers``."""
    settings, actor = parts.config.execution.weight_sync, parts.composite.actor
    part = pushed_part(parts.config)
    base_fingerprint = actor.ranks.base_fingerprint if part == "adapter" else None

    def acknowledged(name: str, version: int) -> None:
        if name == ENGINE:
            keeper.acknowledge(name, version)

    return WeightSync(
        SharedSnapshots(partial(actor.export, part), base=base_fingerprint, bucket_bytes=settings.bucket_mb << 20),
        {ENGINE: receiver, **{follower.name: follower for follower in followers}},
        require_actor=actor.require_actor,
        acknowledged=acknowledged,
        overlap=settings.overlap,
        deadline_s=settings.deadline_s,
    )


def _nothing() -> None:
    """There is nothing to end."""


def _fields(session: Session) -> dict[str, Any]:
    return {field.name: getattr(session, field.name) for field in fields(session)}
