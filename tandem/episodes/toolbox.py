"""All tools that a config names: those of files, and the built-in one. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.base.errors import ConfigError, Problem
from tandem.episodes import python_tool
from tandem.episodes.tools import KEY, Tool, load_tools


def all_tools(names: Sequence[str], sandbox: Mapping[str, Any]) -> dict[str, Tool]:
    """Return the tools of files and of the word ``python``, whose programs have the limits of ``sandbox``.

    Raises ``ConfigError`` as ``load_tools`` does and for two of one name, ``RewardError`` where there is no sandbox.
    """
    found: dict[str, Tool] = {}
    for name in names:
        made = {name: python_tool.python_tool(sandbox)} if name == python_tool.NAME else load_tools(name)
        found = together(found, made)
    return found


def together(some: Mapping[str, Tool], more: Mapping[str, Tool]) -> dict[str, Tool]:
    """Return both. Raises ``ConfigError`` for a name that both have."""
    if twice := some.keys() & more.keys():
        name = min(twice)
        raise ConfigError([Problem(KEY, name, f"there are two tools {name!r}", "Give one of them another name")])
    return {**some, **more}
