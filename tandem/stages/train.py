"""The train call."""

from __future__ import annotations

from tandem.stages.facts import ACTOR, COMPUTED_IN_TRAINING, GIVEN, PROMPT_ROUTES, ROUTES, Step
from tandem.stages.stage import Stage


class Train(Stage):
    """The train call, which the loop makes: ``actor.step`` on the complete partition."""

    name, phase, part, changes_weights = "train", "partition", "train", True

    def needs(self, step: Step) -> tuple[str, ...]:
        read = () if step.loss is None else step.loss.columns
        needed = [*GIVEN, *(name for name in read if name not in COMPUTED_IN_TRAINING)]
        if "loss_mask" in step.correction_columns:
            needed.append("loss_mask")
        if step.kl_in == "loss":
            needed.append("ref_logprobs")
        needed += step.teacher_columns
        absent = {
            "advantages": step.generates and not step.learns_from_reward,
            "old_logprobs": step.generates and step.old_logprobs == "implied",
        }
        return tuple(name for name in dict.fromkeys(needed) if not absent.get(name))

    def takes(self, step: Step) -> tuple[str, ...]:
        read = () if step.loss is None else step.loss.optional_columns
        added = (name for name in read if name in (*step.correction_columns, *step.further_columns))
        return (*added, PROMPT_ROUTES, ROUTES)

    def gives(self, step: Step) -> tuple[str, ...]:
        return ()

    def role(self, step: Step) -> str:
        return ACTOR

    def tag(self, step: Step) -> str | None:
        return ACTOR
