"""From the config's ``rollout.episode`` to what plays episodes."""

from __future__ import annotations

from typing import Any

from tandem.base.errors import ConfigError, Problem
from tandem.base.user_code import import_ends
from tandem.config.model import EpisodeConfig
from tandem.config.schema import Config
from tandem.data.tools import Tools
from tandem.episodes.built_in import past_of
from tandem.episodes.parsers import format_of
from tandem.episodes.process.pool import EpisodePool
from tandem.episodes.process.spec import EpisodeSpec
from tandem.episodes.python_tool import NAME as PYTHON
from tandem.episodes.servers import server_definitions
from tandem.episodes.toolbox import all_tools
from tandem.episodes.tools import KEY
from tandem.plan.checks.samples.episode import plays_episodes
from tandem.roles.rollout.episodes import EpisodeGroups
from tandem.roles.rollout.talk import EpisodeRules
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

    Raises ``ConfigError`` for a file of tools that can't be run, or a server that doesn't start.
    """
    episode = config.actor_rollout_ref.rollout.episode
    if not episode.tools and not episode.mcp:
        return None
    for file in episode.tools:
        if file != PYTHON and (reason := import_ends(file)) is not None:
            raise ConfigError([Problem(KEY, file, reason, "Mend the file: what takes long belongs into a tool")])
    made = all_tools(episode.tools, _limits(episode))
    of_servers = server_definitions(episode.mcp, episode.start_s) if episode.mcp else []
    return [*(tool.definition for tool in made.values()), *of_servers]


def _limits(episode: EpisodeConfig) -> dict[str, Any]:
    """Return the limits of the programs that a model writes; none where it can't have one run."""
    if PYTHON not in episode.tools:
        return {}
    given = episode.sandbox
    return {
        "isolation": given.isolation,
        "seconds": given.seconds,
        "memory_mb": given.memory_mb,
        "packages": given.packages,
    }


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
        branches=episode.branches,
        servers=episode.mcp,
        sandbox=_limits(episode),
    )
    rules = EpisodeRules(
        max_turns=episode.max_turns,
        max_prompt=config.data.max_prompt_length,
        tools=tools,
        tool_format=shown,
        past=past_of(episode),
        turn_rewards=episode.turn_rewards,
        max_sampled=episode.max_sampled,
        branches=episode.branches,
        streams=rollout.partial != "discard",
    )
    return Episodes(EpisodePool(spec), rules)
