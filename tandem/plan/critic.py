"""What the config says of the critic, where it says it and where it leaves it to the actor's keys. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.base.errors import Problem
from tandem.config.model import ModelConfig
from tandem.config.schema import Config


def critic_model(config: Config) -> ModelConfig:
    """The model that the critic starts from."""
    own = config.critic.model
    return config.actor_rollout_ref.model if own is None else own


def critic_epochs(config: Config) -> int:
    """Passes of the critic over a partition."""
    own = config.critic.ppo_epochs
    return config.actor_rollout_ref.actor.ppo_epochs if own is None else own


def critic_token_budget(config: Config) -> int:
    """Tokens of the critic's micro-batches."""
    own = config.critic.ppo_max_token_len_per_gpu
    return config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu if own is None else own


def untrained_steps(config: Config) -> int:
    """First steps in which the actor is not trained."""
    return config.critic.warmup_steps if config.critic.enable else 0


def trained_steps(config: Config, steps: int) -> int:
    """Of so many steps, those in which the actor is trained."""
    return max(0, steps - untrained_steps(config))


def other_tokens(config: Config, actor: Mapping[str, int], critic: Mapping[str, int]) -> Problem | None:
    """The problem of a critic whose vocabulary (token -> id) gives a token of the actor's another id, or none.

    Tokens of its own it may have.
    """
    for token, number in actor.items():
        if critic.get(token) != number:
            other = f"it is {critic[token]}" if token in critic else "there is no such token"
            reason = f"the actor's token {token!r} is {number}, and in this model's vocabulary {other}"
            remedy = "Name a model of the same tokenizer, or leave critic.model out to start from the actor's"
            return Problem("critic.model.path", critic_model(config).path, reason, remedy)
    return None
