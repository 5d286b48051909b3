"""Advantages: one per token, from the rewards."""

from __future__ import annotations

from tandem.stages.facts import ADVANTAGES, Step
from tandem.stages.stage import Roles, Run, Stage


class Advantages(Stage):
    """The advantages, once over the partition: an estimator's statistics may see all of it."""

    name, phase, part = "advantages", "partition", "advantages"

    def wanted(self, step: Step) -> bool:
        return step.learns_from_reward

    def needs(self, step: Step) -> tuple[str, ...]:
        estimated = () if step.estimator is None else step.estimator.columns
        own = () if step.token_rewards_given else ("token_rewards",)
        needed = ["rewards", *(name for name in estimated if name not in own)]
        if step.kl_in == "reward":
            needed += ["old_logprobs", "ref_logprobs"]
        return tuple(dict.fromkeys(needed))

    def takes(self, step: Step) -> tuple[str, ...]:
        there = ("reward_valid", "truncated", *step.correction_columns, *step.further_columns)
        return () if step.estimator is None else tuple(n for n in step.estimator.optional_columns if n in there)

    def gives(self, step: Step) -> tuple[str, ...]:
        own = () if step.token_rewards_given else ("token_rewards",)
        return (*own, "advantages", "returns")

    def role(self, step: Step) -> str:
        return step.role(ADVANTAGES)

    def build(self, roles: Roles) -> Run | None:
        return roles.advantages
