"""The episodes that come with Tandem, and how one of the user's is found. Imports no torch."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias

from pydantic import PositiveFloat

from tandem.base.user_code import import_file
from tandem.config.model import EpisodeConfig
from tandem.episodes.environments.openenv import check_sessions, openenv
from tandem.episodes.environments.verifiers import loaded, verifiers
from tandem.episodes.past import Past
from tandem.episodes.policy import Policy, Task
from tandem.episodes.program import program

Episode: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]

SINGLE_TURN = "single_turn"
"""The episode of one answer, for which no process is needed."""


async def tool_calls(task: Task, policy: Policy, *, tool_timeout_s: PositiveFloat = 10.0) -> None:
    """Let the model answer, call tools and be told their results, until it calls none.

    What can't be read as a call is told to it too. A tool has ``tool_timeout_s`` seconds.
    """
    if task.messages is None:
        raise ValueError("tool_calls needs chat messages, and the prompt is plain text: write data.chat: true")
    messages = list(task.messages)
    while True:
        answer = await policy.chat(messages)
        messages.append(answer.message)
        if answer.finish_reason == "length" or not (answer.calls or answer.errors):
            return
        messages += [await policy.call(call, timeout_s=tool_timeout_s) for call in answer.calls]
        messages += [{"role": "tool", "content": f"Error: {error}"} for error in answer.errors]


BUILT_IN: dict[str, Episode] = {
    "tool_calls": tool_calls,
    "program": program,
    "verifiers": verifiers,
    "openenv": openenv,
}
"""Episodes by the names that a config gives them, besides ``single_turn``."""

OTHERS = ("program", "verifiers")
"""Those that are not Tandem's to hold to what was said: the past may be edited unless the config says otherwise."""


def prepare(type_: str, file: str | None, parameters: Mapping[str, Any], concurrency: int) -> None:
    """Make once what all episodes of a process share, at most ``concurrency`` at a time. Whatever that raises passes
    through.
    """
    if file is None and type_ == "verifiers":
        loaded(parameters["env"], json.dumps(parameters.get("args") or {}))
    if file is None and type_ == "openenv":
        check_sessions(parameters["env"], concurrency)


def past_of(episode: EpisodeConfig) -> Past:
    """Return whether the past of the config's episode may change."""
    if episode.past is not None:
        return episode.past
    return "edited" if episode.type in OTHERS and episode.file is None else "fixed"


def begins_anew(episode: EpisodeConfig) -> bool:
    """Tell whether a context may begin anew within a sample of the config's episode."""
    return past_of(episode) != "fixed" or episode.branches > 1


def find_episode(type_: str, file: str | None) -> Episode:
    """Return the episode ``type_``: a function of ``file`` where one is given, else a built-in one.

    What running the file raises passes through. Raises ``TypeError`` for what can't be awaited, whatever a decorator
    has made of it.
    """
    if file is None:
        return BUILT_IN[type_]
    found: Any = getattr(import_file(file), type_)
    if not callable(found) or inspect.isclass(found) or inspect.isasyncgenfunction(found):
        raise TypeError(f"{type_} is no async function that can be called with (task, policy)")
    episode: Episode = found
    return episode
