"""What the processes of episodes are told of what they play."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EpisodeSpec:
    """Which code plays: see ``find_episode``. ``timeout_s``: an episode's own time.

    ``tools`` are files of tools, and ``python``, whose limits are ``sandbox``; ``servers`` are the commands of MCP
    servers by name.

    ``workers`` processes, each with at most ``concurrency`` episodes; ``start_s`` is a process's time to get ready.
    ``sampling``: the temperature and top_p that turns are drawn with. ``exact``: the run can be repeated bit by bit.
    ``turn_rewards``: turns may be rewarded one by one. ``branches`` of an episode may go on side by side.
    """

    type: str
    file: str | None
    parameters: Mapping[str, Any]
    tools: Sequence[str]
    timeout_s: float
    workers: int
    concurrency: int
    start_s: float
    sampling: Mapping[str, float] = field(default_factory=dict)
    exact: bool = False
    turn_rewards: bool = False
    branches: int = 1
    servers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sandbox: Mapping[str, Any] = field(default_factory=dict)
