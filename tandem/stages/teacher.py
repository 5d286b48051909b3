"""What the teacher says of the tokens."""

from __future__ import annotations

from tandem.stages.facts import ACTOR, GIVEN, TEACHER, Step
from tandem.stages.stage import Roles, Run, Stage


class Teach(Stage):
    """The teacher's log-probs, by a forward under a tag of its own or by a model of its own."""

    name = TEACHER

    def wanted(self, step: Step) -> bool:
        return bool(step.teacher_columns)

    def needs(self, step: Step) -> tuple[str, ...]:
        by_source = step.config.actor_rollout_ref.teacher.by_source
        return (*GIVEN, *(("data_source",) if by_source else ()))

    def gives(self, step: Step) -> tuple[str, ...]:
        return step.teacher_columns

    def role(self, step: Step) -> str:
        return ACTOR if step.teacher_is_tag else TEACHER

    def tag(self, step: Step) -> str | None:
        return TEACHER if step.teacher_is_tag else None

    def build(self, roles: Roles) -> Run | None:
        return roles.teacher
