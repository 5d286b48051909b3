"""What the config says of the critic, where it says it and where it leaves it to the actor's keys. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.base.errors import Problem
from tandem.config.model import ModelConfig
from tandem.config.schema import Config


@dataclass(frozen=True)
class CriticPlan:
    """How the critic is trained: ``epochs`` passes over a partition, micro-batches of ``max_tokens``."""

    epochs: int
    max_tokens: int


def plan_critic(config: Config) -> CriticPlan | None:
    """Return the plan of the critic, None where there is none. What it leaves out is as for the actor."""
    own, actor = config.critic, config.actor_rollout_ref.actor
    if not own.enable:
        return None
    return CriticPlan(
        epochs=actor.ppo_epochs if own.ppo_epochs is None else own.ppo_epochs,
        max_tokens=actor.micro_batch_tokens if own.ppo_max_token_len_per_gpu is None else own.ppo_max_token_len_per_gpu,
    )


def critic_model(config: Config) -> ModelConfig:
    """Return the model that the critic starts from."""
    own = config.critic.model
    return config.actor_rollout_ref.model if own is None else own


def untrained_steps(config: Config) -> int:
    """Count the first steps in which the actor is not trained."""
    return config.critic.warmup_steps if config.critic.enable else 0


def other_tokens(config: Config, actor: Mapping[str, int], critic: Mapping[str, int]) -> Problem | None:
    """Return the problem of a critic whose vocabulary (token -> id) gives a token of the actor's another id, or none.

    Tokens of its own it may have.
    """
    for token, number in actor.items():
        if critic.get(token) != number:
            other = f"it is {critic[token]}" if token in critic else "there is no such token"
            reason = f"the actor's token {token!r} is {number}, and in this model's vocabulary {other}"
            remedy = "Name a model of the same tokenizer, or leave critic.model out to start from the actor's"
            return Problem("critic.model.path", critic_model(config).path, reason, remedy)
    return None
