"""The episode ``verifiers``: an environment of that package asks the policy, and its rubric gives the reward.

It talks to the policy as the package's client of the OpenAI protocol would, with no server in between.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tandem.base.environments import ROW, load_environment
from tandem.episodes.address.protocol import Chat, read
from tandem.episodes.address.responses import Head, Reply
from tandem.episodes.policy import EpisodeOver, Policy, Task

_MODEL = "policy"
_said: ContextVar[list[str]] = ContextVar("said")
"""What the rubric of an episode has complained of."""


async def verifiers(task: Task, policy: Policy, *, env: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run the environment ``env``: its module's name, or a .py file that defines ``load_environment``, which is called
    with ``args``.

    The reward is its rubric's, whose further numbers are metrics. Where a limit of turns or tokens ends the episode the
    environment is told that the prompt is too long, and its rubric scores what there is.
    """
    found = loaded(env, json.dumps(args or {}))
    with _complaints() as said:
        state = await found.rollout(_input(task), _client(policy), _MODEL, {})
        if (error := state.get("error")) is not None:
            raise RuntimeError(f"the environment ended with an error: {_chain(error)}")
        await found.rubric.score_rollout(state)
        await found.rubric.cleanup(state)
    if said:
        raise RuntimeError(f"the rubric failed: {said[0]}")
    return {**(state["metrics"] or {}), "score": state["reward"]}


@functools.lru_cache(maxsize=1)
def loaded(env: str, args: str) -> Any:
    """Return the environment, which all episodes of a process share. ``args`` are JSON."""
    found = load_environment(env, json.loads(args))
    logging.getLogger("verifiers").addHandler(_Complaints(logging.ERROR))  # the package has set its loggers up by now
    return found


def _input(task: Task) -> dict[str, Any]:
    """Return the row as the environment gave it, or, where it is of the user's files, as it would give it."""
    row = task.extra_info.get(ROW)
    own = row if isinstance(row, Mapping) else {"answer": task.ground_truth, "example_id": 0, "info": task.extra_info}
    return {**own, "prompt": task.messages or [{"role": "user", "content": task.prompt}]}


def _chain(error: BaseException | None) -> str:
    """Return what an error says, and its causes."""
    said = []
    while error is not None:
        said.append(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        error = error.__cause__
    return " from ".join(said)


class _Complaints(logging.Handler):
    """Keeps what rubrics log in place of raising: they count a function that raised as 0."""

    def emit(self, record: logging.LogRecord) -> None:
        if (
            (said := _said.get(None)) is not None
            and record.name.startswith("verifiers.")
            and "reward func" in record.msg
        ):
            said.append(record.getMessage())


@contextmanager
def _complaints() -> Iterator[list[str]]:
    said: list[str] = []
    token = _said.set(said)
    try:
        yield said
    finally:
        _said.reset(token)


@functools.lru_cache(maxsize=1)
def _client_class() -> Any:
    """Return a client of the package's that asks a policy; made here, since the package is imported on use."""
    base: Any = importlib.import_module("verifiers.clients").OpenAIChatCompletionsClient
    completion = importlib.import_module("openai.types.chat").ChatCompletion
    too_long: Any = importlib.import_module("verifiers.errors").OverlongPromptError

    async def ask(self: Any, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
        policy: Policy = self.client
        body = {"model": model, "messages": prompt, **(sampling_args or {}), **({"tools": tools} if tools else {})}
        asked = read(Chat, json.dumps(body).encode(), policy.sampling)
        try:
            answer = await policy.ask(asked.question(0))
        except EpisodeOver as over:
            raise too_long(f"the limit of {over}") from None
        policy.facts["tool_calls"] += len(answer.calls)
        return completion.model_validate(Reply(asked, [answer], Head("", int(time.time()), model)).body())

    async def accept(self: Any, response: Any) -> None:
        """Accept an empty answer: it is the model's, for the rubric to judge."""

    async def received(self: Any, response: Any) -> Any:
        said = await base.from_native_response(self, response)
        said.message.content = said.message.content or ""
        return said

    members = {"get_native_response": ask, "raise_from_native_response": accept, "from_native_response": received}
    return type("PolicyClient", (base,), members)


def _client(policy: Policy) -> Any:
    return _client_class()(policy)
