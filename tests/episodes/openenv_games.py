"""Environments of OpenEnv: one that is told a number, one that is shown two, one with tools."""

from __future__ import annotations

import time
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, MCPEnvironment, Observation, State


class Guess(Action):
    said: str


class Pair(Action):
    """Say two numbers."""

    x: int
    y: int = 0


class Heard(Observation):
    text: str = ""


class Game(Environment[Guess, Heard, State]):
    """Wants ``wanted``, within three steps of which each but the right one costs 0.5."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, wanted: str = "12", fate: str = "well") -> None:
        super().__init__()
        self.wanted, self.fate, self.steps = wanted, fate, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Heard:
        self.wanted = given.get("wanted", self.wanted)
        return Heard(text="what is the answer")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Heard:
        if self.fate == "raises":
            raise RuntimeError("no dice")
        if self.fate == "hangs":
            time.sleep(600)
        self.steps += 1
        right = action.said == self.wanted
        return Heard(text="is it", done=right or self.steps == 3, reward=1.0 if right else -0.5)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


class Pairs(Environment):
    """Wants two numbers whose sum is 4; one session at a time."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        return Heard(text="the answer is 4")

    def step(self, action: Pair, timeout_s: float | None = None, **_: Any) -> Heard:
        return Heard(text="is it", done=action.x + action.y == 4, reward=float(action.x + action.y == 4))

    @property
    def state(self) -> State:
        return State()


class Tools(MCPEnvironment):
    """Offers a tool, and gives no reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("sums")

        @server.tool()
        def add(x: int, y: int = 1) -> int:
            """Add two numbers."""
            return x + y

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        return Heard(text="add them")

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("there are only tools")

    @property
    def state(self) -> State:
        return State()
