"""What a model may call: whether files, servers and the sandbox's packages are there. Nothing of them is run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from tandem.base.environments import lacks
from tandem.base.errors import Problem
from tandem.config.model import EpisodeConfig
from tandem.episodes.python_tool import NAME as PYTHON
from tandem.episodes.static import wrong_tools
from tandem.reward.sandbox.walls import find_package

EPISODE = "actor_rollout_ref.rollout.episode"
OWN_TOOLS = ("verifiers", "openenv")
"""Built-in episodes whose environments offer tools themselves."""


def check_tools(episode: EpisodeConfig) -> Iterator[Problem]:
    """Yield every problem of the tools themselves; whether the model's template has a place for them is another."""
    if episode.type in OWN_TOOLS and episode.file is None:
        key, value = ("tools", list(episode.tools)) if episode.tools else ("mcp", dict(episode.mcp))
        reason = f"the environment of an episode {episode.type} has tools of its own"
        yield Problem(f"{EPISODE}.{key}", value, reason, "Leave it out")
    for file in episode.tools:
        if file != PYTHON and (wrong := wrong_tools(Path(file))) is not None:
            remedy = "Write a .py file of functions whose parameters have types, as in def add(x: int, y: int)"
            yield Problem(f"{EPISODE}.tools", file, wrong, remedy)
    for name in episode.sandbox.packages:
        if not find_package(name):
            reason = f"there is no installed package {name!r}"
            yield Problem(f"{EPISODE}.sandbox.packages", name, reason, f"Install {name}, or leave it out")
    if episode.mcp and lacks("mcp"):
        reason = "its servers need the package mcp, which is not installed here"
        yield Problem(f"{EPISODE}.mcp", dict(episode.mcp), reason, "Run pip install 'tandem-rl[mcp]'")
        return
    for name, command in episode.mcp.items():
        if not command or shutil.which(command[0]) is None:
            reason = f"there is no program {command[0]!r} on PATH, or it may not be run" if command else "it is empty"
            remedy = "Write the command of the server, as in [uvx, mcp-server-time]"
            yield Problem(f"{EPISODE}.mcp.{name}", list(command), reason, remedy)
