"""Sections that are handed out alone know the config that they stand in, and nothing else changes by it."""

from __future__ import annotations

import copy
import pickle

from tandem.config.load import config_from_tree
from tandem.config.model import ActorRolloutRef, ModelConfig
from tandem.config.schema import Config, RewardConfig


def config(path: str = "owner/model") -> Config:
    return config_from_tree({"actor_rollout_ref": {"model": {"path": path}}}, Config)


def test_a_section_finds_its_own_config() -> None:
    one, other = config("one"), config("other")  # both leave reward_manager at its default
    for whole in (one, other):
        assert whole.reward_manager.root is whole.actor_rollout_ref.root is whole


def test_a_section_made_by_hand_has_no_whole_and_gets_none() -> None:
    section = ActorRolloutRef(model=ModelConfig(path="owner/model"))
    whole = Config(actor_rollout_ref=section)
    assert section.root is RewardConfig().root is None
    assert whole.actor_rollout_ref.root is whole


def test_copies_point_at_themselves() -> None:
    whole = config()
    for copied in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
        assert copied.actor_rollout_ref.root is copied.reward_manager.root is copied


def test_what_a_section_says_does_not_include_where_it_stands() -> None:
    one, other = config(), config()
    assert one == other and one.reward_manager == other.reward_manager == RewardConfig()
    assert hash(one.reward_manager) == hash(other.reward_manager)
    assert one != config("another")
    assert Config.model_validate(one.model_dump(by_alias=True)) == one
    assert "Whole" not in repr(one)
