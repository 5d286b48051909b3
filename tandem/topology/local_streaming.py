"""The local runtime of the streaming modes: the engine in a process of its own, its loop in a thread of this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from tandem.config.schema import Config
from tandem.dataflow.gatekeeper import GateKeeper
from tandem.models.loading import load_causal_lm
from tandem.roles.actor import Actor
from tandem.roles.rollout_stream import StreamingRollout
from tandem.roles.serving import ForwardModel
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import RolloutEngine
from tandem.topology.parts import ENGINE, Parts
from tandem.topology.session import Session
from tandem.topology.streaming import StreamingSession


def connect_streaming(parts: Parts, followers: Sequence[ForwardModel] = ()) -> StreamingSession:
    """Engine, loop and publisher around the parts that all modes share; ``followers`` get every version too."""
    config, execution = parts.config, parts.config.execution
    assert execution.mode != "colocate"
    engine, close = _engine(config)
    keeper = GateKeeper(parts.gate(execution.max_staleness))
    plane = parts.plane(execution.max_staleness + 1, execution.data_plane.capacity_groups)
    stream = StreamingRollout(
        ENGINE, engine, parts.source, parts.rewards, plane, keeper, parts.filling(), parts.composite.tokenizer
    )
    shared = parts.session(stream, plane, execution.max_staleness)
    return StreamingSession(
        **_fields(shared),
        keeper=keeper,
        streams=(stream,),
        publisher=DirectPublisher(parts.composite.actor, engine, keeper, followers),
        on_weight_update=config.actor_rollout_ref.rollout.on_weight_update,
        sub_batches=parts.plan.batch.sub_batches,
        closers=(close,),
    )


def _engine(config: Config) -> tuple[RolloutEngine, Callable[[], None]]:
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    engine = HfEngine(
        load_causal_lm(model.path, dtype=model.dtype, trust_remote_code=model.trust_remote_code),
        version=-1,
        exact=config.trainer.exact,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
    )
    return engine, lambda: None


class DirectPublisher:
    def __init__(
        self, actor: Actor, engine: RolloutEngine, keeper: GateKeeper, followers: Sequence[ForwardModel]
    ) -> None:
        self._actor, self._engine, self._keeper, self._followers = actor, engine, keeper, followers

    def push(self, version: int) -> dict[str, float]:
        self._engine.load(self._actor.export(), version)
        for follower in self._followers:
            follower.load(self._actor.export(), version)
        self._keeper.acknowledge(ENGINE, version)
        return {}

    def check(self) -> None: ...
    def close(self) -> None: ...


def _fields(session: Session) -> dict[str, Any]:
    return {field.name: getattr(session, field.name) for field in fields(session)}
