"""Rollout workers, each an engine's loop, and how weights reach them: what all modes have in which engines have weights
of their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tandem.dataflow.gate import Gate
from tandem.dataflow.store import DataPlane
from tandem.plan.parts.engine import after_swap, engine_capabilities, probe_interval
from tandem.roles.probing import LogprobProbe
from tandem.roles.rollout.spare_groups import SpareGroups
from tandem.roles.rollout.updated import UpdatedWorker
from tandem.roles.rollout.utilization import ScoringWait, StepClock
from tandem.roles.rollout.worker import RolloutWorker
from tandem.roles.rollout.workers import RolloutWorkers
from tandem.roles.serving import ForwardModel
from tandem.rollout.protocol import RolloutEngine
from tandem.session.build.assemble import OfMode
from tandem.session.build.parts import Parts
from tandem.session.rollout import Workers
from tandem.session.weights import PushedWeights, Swap
from tandem.weights.sync import WeightSync


def connect_workers(parts: Parts, replicas: Sequence[ForwardModel] = (), *, asleep: bool = False) -> OfMode[Workers]:
    """Build the rollout workers of the run, and how weights reach them; ``replicas`` get every version too.

    ``asleep``: engines are when weights come.
    """
    execution, pool, flow = parts.config.execution, parts.runtime.pool, parts.plan.flow
    staleness, capacity = flow.staleness, execution.data_plane.capacity_groups
    gate = parts.gate(staleness, list(pool.engines), capacity)
    plane = parts.runtime.plane(parts.ledger(staleness + 1, capacity))
    log, waits, clock = parts.open_log(), parts.waits(), StepClock()
    scoring = ScoringWait(clock)
    spares = parts.spares(gate)
    make = partial(_worker, parts, plane, gate, clock, scoring, spares)
    gives = all(engine_capabilities(one).logprobs for one in (parts.config, after_swap(parts.config)))

    def receive(worker: RolloutWorker) -> UpdatedWorker:
        return UpdatedWorker(worker, gate, flow.on_weight_update, execution.deadline_s, logprobs=gives, asleep=asleep)

    began = [make(name, engine) for name, engine in pool.engines.items()]
    role = RolloutWorkers(
        began,
        pool,
        gate,
        _weight_sync(parts, gate, [receive(worker) for worker in began], replicas),
        restart=lambda name: make(name, parts.runtime.restart(name)),
        receiver=receive,
        max_restarts=execution.max_engine_restarts,
    )
    groups = [stage for stage in parts.plan.stages if stage.phase == "group"]
    workers = Workers(
        role,
        parts.rewards,
        plane,
        gate,
        clock,
        scoring,
        parts.progress,
        waits,
        log,
        lanes=staleness + 1,
        stages=groups,
        spares=spares,
    )
    waits.watch(workers)
    swap = parts.config.actor_rollout_ref.rollout.swap
    other = None if swap is None else Swap(swap.step, parts.runtime.swap, execution.deadline_s)
    weights = PushedWeights(workers, log, other)
    return OfMode(
        workers,
        weights,
        plane,
        waits,
        log,
        (workers, weights),
        evaluating=workers.evaluating,
        counting=clock.running,
        sub_batches=flow.sub_batches,
        staleness=staleness,
        beside=True,
    )


def _worker(
    parts: Parts,
    plane: DataPlane,
    gate: Gate,
    clock: StepClock,
    scoring: ScoringWait,
    spares: SpareGroups | None,
    name: str,
    engine: RolloutEngine,
) -> RolloutWorker:
    return RolloutWorker(
        name,
        engine,
        parts.source,
        parts.rewards,
        plane,
        gate,
        parts.filling(),
        parts.composite.tokenizer,
        partial=parts.config.actor_rollout_ref.rollout.partial,
        clock=clock,
        scoring_wait=scoring,
        making=parts.making(),
        spares=spares,
    )


def _weight_sync(
    parts: Parts, gate: Gate, receivers: Sequence[UpdatedWorker], replicas: Sequence[ForwardModel]
) -> WeightSync:
    """Return the sync from the actor to the rollout engines, whose versions the gate must know, and to ``replicas``."""
    settings, following = parts.config.execution.weight_sync, {replica.name: replica for replica in replicas}

    def acknowledged(name: str, version: int) -> None:
        if name not in following:
            gate.acknowledge(name, version)

    return WeightSync(
        parts.runtime.snapshots(parts.composite),
        {**{receiver.name: receiver for receiver in receivers}, **following},
        require_actor=parts.composite.actor.require_actor,
        acknowledged=acknowledged,
        probe=_probe(parts),
        overlap=settings.overlap,
        deadline_s=settings.deadline_s,
        health_s=settings.health_s,
    )


def _probe(parts: Parts) -> LogprobProbe:
    """Return what shows that engines generate with what they were sent."""
    config, tokenizer = parts.config, parts.composite.tokenizer
    return LogprobProbe.of(
        parts.composite.actor.ranks,
        tokenizer,
        longest=config.data.max_prompt_length,
        every=probe_interval(config),
        dtype=config.actor_rollout_ref.model.dtype,
    )
