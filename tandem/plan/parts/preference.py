"""Preference training in a plan: which config asks for it, and the stages that follow from the loss's signature."""

from __future__ import annotations

from typing import Any

from tandem.algorithms import PREFERENCE_LOSSES
from tandem.base.registry import Entry
from tandem.config.schema import Config

PREFERENCE_COLUMNS = (
    "prompts",
    "responses",
    "response_mask",
    "preferred",
    "group_ids",
    "sample_index",
    "uid",
    "prompt_text",
    "data_source",
)
"""What a row of preferences brings from the data."""


def preference_loss(config: Config) -> Entry[Any] | None:
    """Return the preference loss that the config names as its policy loss; None where it names another kind of loss."""
    entries = {name: PREFERENCE_LOSSES[name] for name in PREFERENCE_LOSSES}
    return entries.get(config.algorithm.policy_loss.type)


def learns_preferences(config: Config) -> bool:
    """Return whether the run learns from given answers, so that nothing is generated and nothing scored."""
    return preference_loss(config) is not None


def loss_reads(config: Config, column: str) -> bool:
    """Return whether the config's preference loss, if it is one, reads ``column``."""
    entry = preference_loss(config)
    return entry is not None and column in entry.signature.columns


def samples_per_prompt(config: Config) -> int:
    """Count the samples of a group: generated ones, or the given answers (a pair, or one where rows are labelled)."""
    if learns_preferences(config):
        return 2 if config.data.label_key is None else 1
    return config.actor_rollout_ref.rollout.n
