"""The critic's value of the state before each token."""

from __future__ import annotations

from tandem.stages.facts import CRITIC, GIVEN, Step
from tandem.stages.stage import Roles, Run, Stage


class Values(Stage):
    """The critic's value of each token, by a forward."""

    name, part = "values", "values"

    def wanted(self, step: Step) -> bool:
        return step.critic

    def needs(self, step: Step) -> tuple[str, ...]:
        return GIVEN

    def gives(self, step: Step) -> tuple[str, ...]:
        return ("values",)

    def role(self, step: Step) -> str:
        return CRITIC

    def build(self, roles: Roles) -> Run | None:
        return roles.values
