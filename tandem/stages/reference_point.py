"""KTO's reference point: the KL that an answer's gain is measured from."""

from __future__ import annotations

from tandem.stages.facts import ACTOR, GIVEN, REF, Step
from tandem.stages.stage import Roles, Run, Stage


class ReferencePoint(Stage):
    """KTO's reference point: forwards on prompts with the answers to others, and a mean over the whole batch."""

    name, phase = "reference_point", "partition"

    def wanted(self, step: Step) -> bool:
        return not step.generates and step.loss_reads("reference_point")

    def needs(self, step: Step) -> tuple[str, ...]:
        return (*GIVEN, "group_ids", "sample_index")

    def gives(self, step: Step) -> tuple[str, ...]:
        return ("reference_point",)

    def role(self, step: Step) -> str:
        return ACTOR

    def tag(self, step: Step) -> str | None:
        return REF

    def build(self, roles: Roles) -> Run | None:
        return roles.reference_point
