"""Scoring: each answer gets a reward."""

from __future__ import annotations

from tandem.reward.parts import component_names
from tandem.stages.facts import GIVEN, REWARD, Step
from tandem.stages.stage import Stage

SAMPLE_COLUMNS = {
    "response": "responses",
    "response_length": "responses",
    "prompt": "prompt_text",
    "ground_truth": "ground_truth",
    "data_source": "data_source",
    "extra_info": "extra_info",
    "truncated": "truncated",
}
"""What a scorer of single samples names its parameters -> the column that it comes from."""


class Score(Stage):
    """The rewards, computed beside generation, so that their time is a part of the rollout's."""

    name, phase, part = "reward", "group", "rollout"

    def wanted(self, step: Step) -> bool:
        return step.generates

    def needs(self, step: Step) -> tuple[str, ...]:
        asked = () if step.scorer is None else step.scorer.columns + step.scorer.optional_columns
        return tuple(dict.fromkeys([*GIVEN, *(SAMPLE_COLUMNS.get(name, name) for name in asked)]))

    def gives(self, step: Step) -> tuple[str, ...]:
        reward = step.config.reward_manager
        parts = component_names(reward.type, reward.file, reward.parameters)
        return (
            "rewards",
            "reward_valid",
            "scoring",
            *(["reward_components"] if parts else []),
            *(["reward_baselines"] if step.estimator_reads("reward_baselines") else []),
        )

    def role(self, step: Step) -> str:
        return REWARD
