"""The fully asynchronous mode: a loop in a thread, and weights of its own, for each role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from tandem.columns.proto import DataProto
from tandem.plan.teacher import TEACHER
from tandem.roles.critic import CRITIC
from tandem.roles.serving import ForwardModel, ServingRole, columns_read
from tandem.roles.stages import BatchStage
from tandem.session.async_session import AsyncSession, Loops
from tandem.session.connect_streaming import connect_loops
from tandem.session.moved_reference import REFERENCE, last_refresh, restore_reference
from tandem.session.parts import Parts

ACTOR_FWD, ADVANTAGES = "actor_fwd", "advantages"
ELSEWHERE = ("ref", TEACHER, "old", "values", "train_critic")
"""Stages that other roles than the advantages run."""


def connect_async(parts: Parts) -> AsyncSession:
    """The streaming session of the mode, with the roles that serve the actor beside it."""
    execution = parts.config.execution
    assert execution.mode == "fully_async"
    forward = _forward_model(parts, ACTOR_FWD) if _has(parts, "old") and _role(parts, "old") == ACTOR_FWD else None
    interval = parts.config.actor_rollout_ref.ref.update_interval
    reference = _forward_model(parts, REFERENCE, every=interval) if _has(parts, "ref") else None
    replicas = [replica for replica in (forward, reference) if replica is not None]
    groups = parts.config.data.train_batch_size // parts.plan.batch.sub_batches
    deadline_s, roles = execution.deadline_s, []
    if reference is not None:
        if parts.resumed is not None:
            restore_reference(reference, parts.resumed)
        begin = partial(_refresh, reference, interval, deadline_s)
        roles.append(
            _serving(parts, REFERENCE, {"ref": partial(reference.logprobs, column="ref_logprobs")}, groups, begin)
        )
    if forward is not None:
        squares = any("sum_pi_squared" in stage.gives for stage in parts.plan.stages)
        begin = partial(_follow, forward, execution.max_staleness, deadline_s)
        roles.append(_serving(parts, ACTOR_FWD, {"old": partial(_old_logprobs, forward, squares)}, groups, begin))
    taught = {stage.name: stage.run for stage in parts.composite.stages if stage.name == TEACHER}
    if taught:
        roles.append(_serving(parts, TEACHER, taught, groups))
    critic = parts.composite.critic
    if critic is not None:
        begin = partial(critic.await_steps, seconds=deadline_s)  # partition k is valued by the critic after step k - 1
        roles.append(_serving(parts, CRITIC, {"values": critic.values}, groups, begin))
    own = {stage.name: stage.run for stage in parts.composite.stages if stage.name not in ELSEWHERE}
    if own:
        roles.append(_serving(parts, ADVANTAGES, own, parts.config.data.train_batch_size))
    handles = {"roles": tuple(roles), "models": tuple(replicas), "loops": Loops()}
    return connect_loops(parts, AsyncSession, replicas, **handles)


def _has(parts: Parts, stage: str) -> bool:
    return any(planned.name == stage for planned in parts.plan.stages)


def _role(parts: Parts, stage: str) -> str:
    return next(planned.role for planned in parts.plan.stages if planned.name == stage)


def _serving(
    parts: Parts,
    name: str,
    runs: dict[str, Callable[[DataProto], DataProto]],
    groups: int,
    begin: Callable[[int], None] | None = None,
) -> ServingRole:
    """The role that runs these stages, with the columns that the plan gives them."""
    stages = tuple(
        BatchStage(stage.name, stage.needs, stage.gives, runs[stage.name], stage.per)
        for stage in parts.plan.stages
        if stage.name in runs
    )
    role = ServingRole(name, stages, columns_read(stages), groups)
    return role if begin is None else replace(role, begin=begin)


def _forward_model(parts: Parts, name: str, every: int | None = 1) -> ForwardModel:
    """A copy of the model as it was before training: version 0 until the first broadcast."""
    return ForwardModel(name, parts.runtime.scorer(name, moves=every is not None), version=0, every=every)


def _follow(model: ForwardModel, max_staleness: int, seconds: float, partition: int) -> None:
    """One version for the whole partition k: the newest held of those from k - max_staleness to k."""
    model.adopt(max(0, partition - max_staleness), partition, seconds)


def _refresh(model: ForwardModel, interval: int | None, seconds: float, partition: int) -> None:
    """The reference of partition k is the actor of the last multiple of the interval; version 0 without one."""
    wanted = last_refresh(interval, partition)
    model.adopt(wanted, wanted, seconds)


def _old_logprobs(model: ForwardModel, squares: bool, batch: DataProto) -> DataProto:
    scored = model.logprobs(batch, "old_logprobs", squares=squares)
    return scored.union(DataProto({"old_version": torch.full((len(batch),), model.version, dtype=torch.int64)}))
