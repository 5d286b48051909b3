"""From the config's ``rollout.episode`` to what plays episodes."""

from __future__ import annotations

from typing import Any

from tandem.base.errors import ConfigError, Problem
from tandem.base.user_code import import_ends
from tandem.config.schema import Config
from tandem.data.tools import Tools
from tandem.episodes.built_in import past_of
from tandem.episodes.parsers import format_of
from tandem.episodes.process.pool import EpisodePool, EpisodeSpec
from tandem.episodes.tools import KEY, load_tools
from tandem.plan.checks.episode import plays_episodes
from tandem.roles.rollout.episodes import EpisodeGroups, EpisodeRules
from tandem.rollout.protocol import Sampling


class Episodes:
    """What makes groups of episodes, in processes that it starts and ends. Called as ``MakeGroups`` is."""

    def __init__(self, pool: EpisodePool, rules: EpisodeRules) -> None:
        self._pool, self._rules = pool, rules

    def __call__(self, sampling: Sampling, tokenizer: Any) -> EpisodeGroups:
        return EpisodeGroups(self._pool, self._rules, sampling, tokenizer)

    def await_ready(self) -> None:
        """Wait until an episode can begin. Raises ``TandemError`` where none will."""
        self._pool.await_ready()

    def close(self) -> None:
        """End the processes of the pool."""
        self._pool.close()


def offered_tools(config: Config) -> Tools | None:
    """Return the definitions of the tools that every prompt offers; None without any.

    Raises ``ConfigError`` for a file of tools that can't be run.
    """
    file = config.actor_rollout_ref.rollout.episode.tools
    if file is None:
        return None
    if (reason := import_ends(file)) is not None:
        raise ConfigError([Problem(KEY, file, reason, "Mend the file: what takes long belongs into a tool")])
    return [tool.definition for tool in load_tools(file).values()]


def build_episodes(config: Config, tokenizer: Any) -> Episodes | None:
    """Return what plays the episodes of the config; None where a sample is one answer."""
    if not plays_episodes(config):
        return None
    rollout, tools = config.actor_rollout_ref.rollout, offered_tools(config)
    episode = rollout.episode
    shown = format_of(str(tokenizer.chat_template or "")) if episode.tool_format == "auto" else episode.tool_format
    spec = EpisodeSpec(
        episode.type,
        episode.file,
        episode.parameters,
        episode.tools,
        timeout_s=episode.timeout_s,
        workers=episode.workers,
        concurrency=episode.concurrency,
        start_s=episode.start_s,
        sampling={"temperature": rollout.temperature, "top_p": rollout.top_p},
        exact=config.trainer.exact,
        turn_rewards=episode.turn_rewards,
    )
    rules = EpisodeRules(
        max_turns=episode.max_turns,
        max_prompt=config.data.max_prompt_length,
        tools=tools,
        tool_format=shown,
        past=past_of(episode),
        turn_rewards=episode.turn_rewards,
    )
    return Episodes(EpisodePool(spec), rules)
