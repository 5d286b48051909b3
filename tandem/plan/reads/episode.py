"""Which keys of an episode are read only in some configurations."""

from __future__ import annotations

from collections.abc import Callable

from tandem.config.model import SandboxConfig
from tandem.config.schema import Config
from tandem.episodes.python_tool import NAME as PYTHON
from tandem.plan.checks.samples.episode import EPISODE, plays_episodes
from tandem.plan.parts.teacher import learns_from_reward
from tandem.plan.reads.form import Reads, S

_PLAYED = (
    "file",
    "tools",
    "mcp",
    "tool_format",
    "past",
    "branches",
    "max_turns",
    "max_sampled",
    "timeout_s",
    "workers",
    "concurrency",
    "start_s",
)


def episode_reads(config_of: Callable[[S], Config]) -> tuple[Reads[S], ...]:
    """Return the reads of ``rollout.episode``."""
    return (
        Reads(
            (f"{EPISODE}.turn_rewards",),
            lambda s: plays_episodes(config_of(s)) and learns_from_reward(config_of(s)),
            lambda s: (
                "nothing is learned from a reward"
                if plays_episodes(config_of(s))
                else "an episode is one answer, which is rewarded as a whole"
            ),
            "Leave it out",
        ),
        Reads(
            tuple(f"{EPISODE}.{name}" for name in _PLAYED),
            lambda s: plays_episodes(config_of(s)),
            "an episode is one answer, which has no tools and no turns",
            f"Write {EPISODE}.type: tool_calls, or leave it out",
        ),
        Reads(
            tuple(f"{EPISODE}.sandbox.{name}" for name in SandboxConfig.model_fields),
            lambda s: PYTHON in config_of(s).actor_rollout_ref.rollout.episode.tools,
            f"no program is run: {PYTHON} is not among the tools",
            f"Write {EPISODE}.tools: [{PYTHON}], or leave it out",
        ),
    )
