"""The proximal log-probs: of the weights at the start of the step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tandem.stages.facts import ACTOR, ACTOR_FWD, ADVANTAGES, GIVEN, OLD_ACTOR, PROMPT_ROUTES, ROUTES, Step
from tandem.stages.stage import Roles, Run, Stage

if TYPE_CHECKING:
    from tandem.columns.proto import DataProto


class OldLogprobs(Stage):
    """The proximal log-probs, by a forward of the actor or of the role actor_fwd; or the engine's stand for them."""

    name, part = "old", "old"

    def wanted(self, step: Step) -> bool:
        return step.old_logprobs != "implied"

    def needs(self, step: Step) -> tuple[str, ...]:
        return GIVEN if step.old_logprobs == "recompute" else ("rollout_logprobs",)

    def takes(self, step: Step) -> tuple[str, ...]:
        return (PROMPT_ROUTES, ROUTES) if step.old_logprobs == "recompute" else ()

    def gives(self, step: Step) -> tuple[str, ...]:
        if step.old_logprobs == "rollout":
            return ("old_logprobs",)
        squares = ("sum_pi_squared",) if step.estimator_reads("sum_pi_squared") else ()
        return ("old_logprobs", *squares, *(("old_version",) if step.apart else ()))

    def role(self, step: Step) -> str:
        return step.role(ACTOR_FWD if step.old_logprobs == "recompute" else ADVANTAGES)

    def tag(self, step: Step) -> str | None:
        if step.apart or step.old_logprobs != "recompute":
            return None
        return OLD_ACTOR if step.keeps_old_actor else ACTOR

    def build(self, roles: Roles) -> Run | None:
        if roles.step.old_logprobs == "rollout":
            return rollout_as_old
        if roles.old_logprobs is None:
            return None
        return partial(roles.old_logprobs, squares=roles.step.estimator_reads("sum_pi_squared"))


def rollout_as_old(batch: DataProto) -> DataProto:
    """Return whether the engine's log-probs stand for the proximal ones, so that no forward is spent on them."""
    return batch.union(type(batch)({"old_logprobs": batch.ragged("rollout_logprobs")}))
