"""The built-in stages, as the loops name them, and the order in which a step does what it does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tandem.stages.advantages import Advantages
from tandem.stages.correction import Correction
from tandem.stages.facts import ACTOR, GIVEN, RESTARTS, Step
from tandem.stages.generate import Generate
from tandem.stages.old_logprobs import OldLogprobs
from tandem.stages.push import Push
from tandem.stages.ref import Ref
from tandem.stages.reference_point import ReferencePoint
from tandem.stages.score import Score
from tandem.stages.stage import PHASES, BatchStage, Part, PlannedStage, Roles, Stage
from tandem.stages.teacher import Teach
from tandem.stages.train import Train
from tandem.stages.train_critic import TrainCritic
from tandem.stages.values import Values

generate, score = Generate(), Score()
ref, teacher, old_logprobs, values = Ref(), Teach(), OldLogprobs(), Values()
reference_point, correction, advantages = ReferencePoint(), Correction(), Advantages()
train_critic, train, push = TrainCritic(), Train(), Push()

BUILT_IN: tuple[Stage, ...] = (
    generate,
    score,
    ref,
    teacher,
    old_logprobs,
    values,
    reference_point,
    correction,
    advantages,
    train_critic,
    train,
    push,
)
"""Stages that columns don't order are done in this order, those of plug-ins after them."""


def plan_step(step: Step, further: Iterable[Stage] = ()) -> tuple[PlannedStage, ...]:
    """Order the stages of a step in order: the built-in ones that are wanted, and ``further`` ones that the config
    names.

    A stage comes after all that give a column which it reads. Else the phase decides, then who changes weights (last),
    then the table. Columns that nothing gives, or that are given too late, are left for the plan to refuse.
    """
    stages = [stage for stage in BUILT_IN if stage.wanted(step)]
    stages += further
    given = {column for stage in stages for column in stage.gives(step)}
    waiting = [_planned(stage, step, given) for stage in stages]
    places = {stage.name: (PHASES.index(stage.phase), stage.changes_weights, i) for i, stage in enumerate(stages)}
    ordered: list[PlannedStage] = []
    while waiting:
        missing = {column for stage in waiting for column in stage.gives}
        ready = [stage for stage in waiting if not missing.intersection(stage.needs)] or waiting
        first = min(ready, key=lambda stage: places[stage.name])
        waiting.remove(first)
        ordered.append(first)
    return tuple(ordered)


def _planned(stage: Stage, step: Step, given: set[str]) -> PlannedStage:
    own, read = stage.gives(step), stage.needs(step)
    further = (*stage.takes(step), *((RESTARTS,) if set(GIVEN) <= set(read) else ()))
    there = [name for name in further if name in given and name not in own]
    needs, role = tuple(dict.fromkeys([*read, *there])), stage.role(step)
    if step.apart and role == ACTOR and not stage.changes_weights:
        role = stage.name  # the actor's loop only trains there
    return PlannedStage(stage.name, role, stage.tag(step), stage.phase, needs, own)


def bind(planned: Iterable[PlannedStage], stages: Sequence[Stage], roles: Roles) -> tuple[BatchStage, ...]:
    """Bind the planned stages that run on batches, in their order, on live ``roles``."""
    by_name = {stage.name: stage for stage in stages}
    bound = []
    for one in planned:
        stage = by_name[one.name]
        run = stage.build(roles)
        if run is not None:
            bound.append(BatchStage(one.name, one.needs, one.gives, run, one.phase, one.role, stage.changes_weights))
    return tuple(bound)


def timed_as(part: Part) -> tuple[str, ...]:
    """Return the keys of ``metrics.jsonl`` that add up to this part of a step."""
    return tuple(stage.time_key for stage in BUILT_IN if stage.part == part)
