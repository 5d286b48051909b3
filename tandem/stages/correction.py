"""Importance weights and rejections between the policy that sampled and the trainer's."""

from __future__ import annotations

from tandem.stages.facts import ADVANTAGES, Step
from tandem.stages.stage import Roles, Run, Stage


class Correction(Stage):
    """The rollout correction, once over the partition: its weights may be normalised over all samples."""

    name, phase, part = "correction", "partition", "advantages"

    def wanted(self, step: Step) -> bool:
        return bool(step.correction_columns)

    def needs(self, step: Step) -> tuple[str, ...]:
        return ("old_logprobs", "rollout_logprobs", "response_mask")

    def gives(self, step: Step) -> tuple[str, ...]:
        return step.correction_columns

    def role(self, step: Step) -> str:
        return step.role(ADVANTAGES)

    def build(self, roles: Roles) -> Run | None:
        return roles.correction
