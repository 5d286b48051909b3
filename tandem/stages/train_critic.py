"""Training the critic, before the actor."""

from __future__ import annotations

from tandem.stages.facts import CRITIC, GIVEN, Step
from tandem.stages.stage import Roles, Run, Stage


class TrainCritic(Stage):
    """The critic's training, in the actor's loop in every mode (docs/decisions/critic-in-the-actors-loop.md)."""

    name, phase, part, changes_weights = "train_critic", "partition", "train", True

    def wanted(self, step: Step) -> bool:
        return step.critic

    def needs(self, step: Step) -> tuple[str, ...]:
        return (*GIVEN, "values", "returns")

    def takes(self, step: Step) -> tuple[str, ...]:
        return tuple(name for name in step.correction_columns if name == "loss_mask")

    def gives(self, step: Step) -> tuple[str, ...]:
        return ()

    def role(self, step: Step) -> str:
        return CRITIC

    def build(self, roles: Roles) -> Run | None:
        return roles.train_critic
