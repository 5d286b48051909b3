"""From the roles of a run to the parts that its loop is handed, mode by mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from tandem.dataflow.partition import Order
from tandem.observe.run_log import RunLog
from tandem.plan.reference import last_refresh
from tandem.roles.rollout.filling import Rollout
from tandem.roles.serving import ForwardModel, ServingRole, columns_read
from tandem.roles.update import SLICES
from tandem.runtime.local import ENGINE
from tandem.session.build.assemble import OfMode, assemble
from tandem.session.build.parts import Parts
from tandem.session.build.workers import connect_workers
from tandem.session.keep.moved_reference import restore_reference
from tandem.session.rollout import RestingWorkers, SharedRollout, TimeSharing, Workers
from tandem.session.serving import ServingRoles
from tandem.session.session import PipelinedSession, ServedSession, Session, TimeShared
from tandem.session.waits import Ranks
from tandem.session.weights import SharedWeights
from tandem.stages.facts import ACTOR, ACTOR_FWD, CRITIC, REFERENCE
from tandem.stages.stage import BatchStage


def connect_shared(parts: Parts) -> Session[TimeShared]:
    """Connect colocate with one engine on the actor's own weights, one partition at a time."""
    composite, plane, gate = parts.composite, parts.runtime.plane(parts.ledger(1)), parts.gate(0, [ENGINE])
    spares = parts.spares(gate)
    filler = Rollout(
        ENGINE,
        composite.engine,
        parts.source,
        parts.rewards,
        plane,
        gate,
        parts.filling(),
        composite.tokenizer,
        making=parts.making(),
        spares=spares,
    )
    log = parts.open_log()
    sharing = _time_sharing(parts, log)
    rollout = SharedRollout(filler, sharing, parts.rewards, spares)
    weights = SharedWeights(composite.actor, composite.engine, filler)
    return assemble(
        parts, Session, OfMode(rollout, weights, plane, parts.waits(), log, (rollout,), evaluating=sharing.evaluating)
    )


def connect_resting(parts: Parts) -> Session[TimeShared]:
    """Connect colocate with engines that have weights of their own: they and the actor take turns."""
    composite = parts.composite
    beside: OfMode[Any] = connect_workers(parts, asleep=True)
    sharing = _time_sharing(parts, beside.log)
    rollout = RestingWorkers(beside.rollout, sharing, composite.engine, beside.plane, beside.waits)
    resting = replace(
        beside, rollout=rollout, parts=(rollout, *beside.parts), evaluating=rollout.evaluating, beside=False
    )
    return assemble(parts, Session, resting)


def _time_sharing(parts: Parts, log: RunLog) -> TimeSharing:
    """Return the turns of actor and engine on their devices."""
    composite, flow = parts.composite, parts.plan.flow
    return TimeSharing(
        composite.actor, composite.engine, log, offload_train=flow.offload_train, offload_rollout=flow.offload_rollout
    )


def connect_streaming(parts: Parts) -> Session[Workers]:
    """Connect hybrid: generation goes on while the actor trains."""
    beside, composite, pipelining = connect_workers(parts), parts.composite, parts.plan.flow.pipelining
    if pipelining == "off":
        return assemble(parts, Session, beside)
    # Slices that are optimizer steps are fixed by ticket: else short samples would always come first.
    order: Order = "canonical" if pipelining == "step" else "arrival"
    slices = SLICES[pipelining](composite.actor, composite.objective)
    return assemble(parts, PipelinedSession, replace(beside, order=order), slices=slices)


def connect_async(parts: Parts) -> ServedSession:
    """Connect fully async: each role has a loop in a thread, and weights, of its own."""
    composite = parts.composite
    for model in composite.models:
        if model.name == REFERENCE and parts.resumed is not None:
            restore_reference(model, parts.resumed)
    beside = connect_workers(parts, composite.models)
    roles = ServingRoles(
        tuple(_serving(parts)),
        composite.models,
        composite.advantages,
        beside.plane,
        parts.config,
        parts.progress,
        beside.log,
        beside.rollout.clock,
    )
    beside.waits.watch(roles, *(Ranks(_left_alone, model.silent) for model in composite.models))
    served = replace(
        beside,
        parts=(roles, *beside.parts),
        columns=roles.gives,
        stages=[stage for stage in composite.stages if not _served(stage)],
        advantage_report=roles.advantage_report,
    )
    return assemble(parts, ServedSession, served, roles=roles)


# --- roles with loops of their own -----------------------------------------------------------------------------------


def _served(stage: BatchStage) -> bool:
    """Return whether a loop beside the actor's runs the stage."""
    return stage.role != ACTOR and not stage.changes_weights


def _serving(parts: Parts) -> Iterator[ServingRole]:
    """Yield the roles that run the planned stages but for those of the actor's own loop.

    One whose stages all take a part of a partition is given the groups of a sub-batch at once, another all.
    """
    whole, batch, begins = parts.config.data.train_batch_size, parts.plan.batch, _begins(parts)
    served = sorted(filter(_served, parts.composite.stages), key=lambda stage: stage.role)
    for role, run in groupby(served, key=lambda stage: stage.role):
        own = tuple(run)
        in_parts = all(stage.phase == "sub_batch" for stage in own)
        groups = batch.sub_batch_prompts if in_parts else whole
        order: Order = "arrival" if in_parts else "canonical"
        yield ServingRole(role, own, columns_read(own), groups, order, begins.get(role, _nothing))


def _begins(parts: Parts) -> dict[str, Callable[[int], None]]:
    """Return what a role does before the first groups of a partition: it waits for the weights that the partition is
    due.
    """
    critic, seconds = parts.composite.critic, parts.config.execution.deadline_s
    interval = parts.config.actor_rollout_ref.ref.update_interval
    models, begins = {model.name: model for model in parts.composite.models}, dict[str, Callable[[int], None]]()
    if REFERENCE in models:
        begins[REFERENCE] = partial(_refresh, models[REFERENCE], interval, seconds)
    if ACTOR_FWD in models:
        begins[ACTOR_FWD] = partial(_follow, models[ACTOR_FWD], parts.plan.flow.staleness, seconds)
    if critic is not None:  # partition k is valued by the critic after step k - 1
        begins[CRITIC] = partial(critic.await_steps, seconds=seconds)
    return begins


def _left_alone() -> None:
    """Do nothing: what has ended a role of its own is raised by its own loop."""


def _nothing(partition: int) -> None:
    """Do nothing: a role without weights needs no preparation."""


def _follow(model: ForwardModel, max_staleness: int, seconds: float, partition: int) -> None:
    """Use one version for the whole partition k: the newest held of those from k - max_staleness to k."""
    model.adopt(max(0, partition - max_staleness), partition, seconds)


def _refresh(model: ForwardModel, interval: int | None, seconds: float, partition: int) -> None:
    """Make the reference of partition k the actor of the last multiple of the interval, or version 0 without one."""
    wanted = last_refresh(interval, partition)
    model.adopt(wanted, wanted, seconds)
