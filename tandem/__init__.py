"""Tandem: RL post-training for language models.

The names below load what they need on first use, so that ``import tandem`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.cli.calls import sft, train
    from tandem.columns.proto import DataProto
    from tandem.config.load import load_config
    from tandem.control.sft import BaseTrainer
    from tandem.data.base_source import BaseDataSource
    from tandem.models.loading import load_model
    from tandem.models.lora import get_lora_model
    from tandem.roles.actor_rollout_ref import ActorRolloutRef, compute_grpo_loss
    from tandem.roles.reward import build_reward_manager
    from tandem.runtime.build.composite import build_actor_rollout_ref
    from tandem.runtime.build.critic import build_critic
    from tandem.runtime.build.sources import build_dataloader
    from tandem.stages.registry import register_stage
    from tandem.stages.stage import Stage

_HOMES = {
    "ActorRolloutRef": "tandem.roles.actor_rollout_ref",
    "BaseDataSource": "tandem.data.base_source",
    "BaseTrainer": "tandem.control.sft",
    "DataProto": "tandem.columns.proto",
    "Stage": "tandem.stages.stage",
    "build_actor_rollout_ref": "tandem.runtime.build.composite",
    "build_critic": "tandem.runtime.build.critic",
    "build_dataloader": "tandem.runtime.build.sources",
    "build_reward_manager": "tandem.roles.reward",
    "compute_grpo_loss": "tandem.roles.actor_rollout_ref",
    "get_lora_model": "tandem.models.lora",
    "load_config": "tandem.config.load",
    "load_model": "tandem.models.loading",
    "register_stage": "tandem.stages.registry",
    "sft": "tandem.cli.calls",
}

__version__ = "0.1.0"
__all__ = [
    "ActorRolloutRef",
    "BaseDataSource",
    "BaseTrainer",
    "DataProto",
    "Stage",
    "build_actor_rollout_ref",
    "build_critic",
    "build_dataloader",
    "build_reward_manager",
    "compute_grpo_loss",
    "get_lora_model",
    "load_config",
    "load_model",
    "register_stage",
    "sft",
    "train",
]


def __getattr__(name: str) -> object:
    if name == "train":  # the package, which is called
        return importlib.import_module("tandem.train")
    if name not in _HOMES:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
