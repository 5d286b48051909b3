"""The reference's log-probs."""

from __future__ import annotations

from tandem.stages.facts import GIVEN, REF, REFERENCE, Step
from tandem.stages.stage import Roles, Run, Stage


class Ref(Stage):
    """The reference's log-probs, by a forward under the actor's tag ``ref`` or by the role reference."""

    name = "ref"

    def wanted(self, step: Step) -> bool:
        return step.reference

    def needs(self, step: Step) -> tuple[str, ...]:
        return GIVEN

    def gives(self, step: Step) -> tuple[str, ...]:
        return ("ref_logprobs",)

    def role(self, step: Step) -> str:
        return step.role(REFERENCE)

    def tag(self, step: Step) -> str | None:
        return None if step.apart else REF

    def build(self, roles: Roles) -> Run | None:
        return roles.ref_logprobs
