"""New weights for everyone who generates or scores with them."""

from __future__ import annotations

from tandem.stages.facts import ACTOR, Step
from tandem.stages.stage import Stage


class Push(Stage):
    """The push of new weights, which the loop does: ``weights.push``."""

    name, phase, part, changes_weights = "publish", "partition", "push", True

    def wanted(self, step: Step) -> bool:
        return step.generates

    def needs(self, step: Step) -> tuple[str, ...]:
        return ()

    def gives(self, step: Step) -> tuple[str, ...]:
        return ()

    def role(self, step: Step) -> str:
        return ACTOR

    def tag(self, step: Step) -> str | None:
        return ACTOR
