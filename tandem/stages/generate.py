"""Generation: each prompt gets a group of answers."""

from __future__ import annotations

from tandem.episodes.built_in import SINGLE_TURN, begins_anew
from tandem.stages.facts import PROMPT_ROUTES, RESTARTS, ROLLOUT, ROUTES, Step
from tandem.stages.stage import Stage

ROLLOUT_COLUMNS = ("responses", "response_mask", "rollout_logprobs", "token_versions", "truncated")


class Generate(Stage):
    """Generation, which the rollout workers do."""

    name, phase, part = "rollout", "group", "rollout"

    def wanted(self, step: Step) -> bool:
        return step.generates

    def needs(self, step: Step) -> tuple[str, ...]:
        return ("prompts",)

    def gives(self, step: Step) -> tuple[str, ...]:
        section = step.config.actor_rollout_ref
        episode, routes = section.rollout.episode, (PROMPT_ROUTES, ROUTES) if section.actor.router_replay else ()
        if episode.type == SINGLE_TURN:
            return (*ROLLOUT_COLUMNS, *routes)
        further = {RESTARTS: begins_anew(episode), "token_rewards": step.turns_rewarded}
        return (*ROLLOUT_COLUMNS, *routes, "episode", *(name for name, given in further.items() if given))

    def role(self, step: Step) -> str:
        return ROLLOUT
