"""The fully asynchronous mode: a loop in a thread, and weights of its own, for each role."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby

from tandem.roles.serving import ForwardModel, ServingRole, columns_read
from tandem.session.async_session import AsyncSession, Loops
from tandem.session.connect_streaming import connect_loops
from tandem.session.moved_reference import last_refresh, restore_reference
from tandem.session.parts import Parts
from tandem.stages.facts import ACTOR, ACTOR_FWD, CRITIC, REFERENCE


def connect_async(parts: Parts) -> AsyncSession:
    """The streaming session of the mode, with the roles that serve the actor beside it."""
    models = parts.composite.models
    for model in models:
        if model.name == REFERENCE and parts.resumed is not None:
            restore_reference(model, parts.resumed)
    handles = {"roles": tuple(_serving(parts)), "models": models, "loops": Loops()}
    return connect_loops(parts, AsyncSession, models, **handles)


def _serving(parts: Parts) -> Iterator[ServingRole]:
    """The roles that run the planned stages but for those of the actor's own loop.

    One whose stages all take a part of a partition is given the groups of a sub-batch at once, another all.
    """
    whole, batch = parts.config.data.train_batch_size, parts.plan.batch
    begin = _begins(parts)
    stages = [stage for stage in parts.composite.stages if stage.role != ACTOR and not stage.changes_weights]
    for role, run in groupby(sorted(stages, key=lambda stage: stage.role), key=lambda stage: stage.role):
        own = tuple(run)
        slices = all(stage.phase == "sub_batch" for stage in own)
        groups = batch.sub_batch_prompts if slices else whole
        yield ServingRole(role, own, columns_read(own), groups, begin.get(role, _nothing))


def _begins(parts: Parts) -> dict[str, Callable[[int], None]]:
    """What a role does before the first groups of a partition: it waits for the weights that the partition is due."""
    execution, critic = parts.config.execution, parts.composite.critic
    assert execution.mode == "fully_async"
    seconds, interval = execution.deadline_s, parts.config.actor_rollout_ref.ref.update_interval
    begin: dict[str, Callable[[int], None]] = {}
    for model in parts.composite.models:
        if model.name == REFERENCE:
            begin[REFERENCE] = partial(_refresh, model, interval, seconds)
        if model.name == ACTOR_FWD:
            begin[ACTOR_FWD] = partial(_follow, model, execution.max_staleness, seconds)
    if critic is not None:  # partition k is valued by the critic after step k - 1
        begin[CRITIC] = partial(critic.await_steps, seconds=seconds)
    return begin


def _nothing(partition: int) -> None:
    """A role without weights needs no preparation."""


def _follow(model: ForwardModel, max_staleness: int, seconds: float, partition: int) -> None:
    """One version for the whole partition k: the newest held of those from k - max_staleness to k."""
    model.adopt(max(0, partition - max_staleness), partition, seconds)


def _refresh(model: ForwardModel, interval: int | None, seconds: float, partition: int) -> None:
    """The reference of partition k is the actor of the last multiple of the interval; version 0 without one."""
    wanted = last_refresh(interval, partition)
    model.adopt(wanted, wanted, seconds)
