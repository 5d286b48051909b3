"""The episode ``openenv``: the policy acts on an environment of OpenEnv, in this process and with no container."""

from __future__ import annotations

import asyncio
import importlib
import json
import typing
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import BaseModel, ValidationError

from tandem.base.user_code import import_file
from tandem.episodes.policy import Policy, Task
from tandem.episodes.tools import as_text

ACT = "act"
"""The tool that stands for an action which is more than a text."""

_OWN = ("done", "reward", "metadata")  # of an observation, none of which is for the model
_LARGEST_SEED = 2**31


async def openenv(task: Task, policy: Policy, *, env: str, args: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Run the environment ``env``, ``module:Class`` or ``file.py:Class``, which is made with ``args`` for each
    episode.

    The reward is the sum of those of its steps; where it gives none, the reward manager scores the last turn.
    """
    kind = environment_class(env)
    thread = ThreadPoolExecutor(1, "environment")  # some want to be in one thread all their life
    play = _Play(kind, args or {}, policy, thread)
    try:
        await play.until_done(task)
    except asyncio.CancelledError:
        policy.leaked = True  # its thread may go on for ever
        raise
    finally:
        await play.close()
        thread.shutdown(wait=False)
    return None if policy.reward is None else {"score": policy.reward, "steps": play.steps}


def environment_class(env: str) -> Any:
    """Return the class of an environment of OpenEnv. What importing it raises passes through, ``TypeError`` for what is
    none.
    """
    place, _, name = env.rpartition(":")
    module = import_file(place) if place.endswith(".py") else importlib.import_module(place)
    found = getattr(module, name, None)
    base: Any = importlib.import_module("openenv.core.env_server.interfaces").Environment
    if not isinstance(found, type) or not issubclass(found, base):
        raise TypeError(f"{place} has no subclass {name} of OpenEnv's Environment")
    return found


def check_sessions(env: str, concurrency: int) -> None:
    """Raise ``TypeError`` for an environment that can't be played by several episodes of a process at a time."""
    if concurrency > 1 and not environment_class(env).SUPPORTS_CONCURRENT_SESSIONS:
        raise TypeError(
            f"{env} takes one session at a time (SUPPORTS_CONCURRENT_SESSIONS is false): write episode.concurrency: 1, "
            "and as many workers as there shall be episodes at a time"
        )


class _Play:
    """One episode: the environment and what was said."""

    def __init__(self, kind: Any, args: Mapping[str, Any], policy: Policy, thread: ThreadPoolExecutor) -> None:
        self.steps = 0
        self._kind, self._args, self._policy, self._thread = kind, args, policy, thread
        self._made: Any = None
        self._mcp: Any = importlib.import_module("openenv.core.env_server.mcp_environment")

    async def until_done(self, task: Task) -> None:
        """Let the policy act until the environment is done, or it answers with no action."""
        self._made = await self._apart(lambda: self._kind(**self._args))
        given = task.extra_info.get("reset")
        reset = dict(given) if isinstance(given, Mapping) else {}
        observation = await self._do("reset", **{"seed": task.seed % _LARGEST_SEED, **reset})
        tools, act = await self._ways()
        messages = _with_text(task, _shown(observation))
        while not observation.done:
            answer = await self._policy.chat(messages, tools=tools)
            messages.append(answer.message)
            if tools and not (answer.calls or answer.errors):
                return
            for call in answer.calls if tools else [None]:
                text, observation = await self._step(act, answer.content if call is None else call, observation)
                messages.append(_message_of(call, text))
                if observation.done:
                    return
            messages += [{"role": "tool", "content": f"Error: {error}"} for error in answer.errors if tools]

    async def close(self) -> None:
        """Let the environment go. What it raises then is nobody's fault but its own, and the episode is over."""
        if self._made is not None and not self._policy.leaked:
            await self._apart(self._made.close)

    async def _step(self, act: Callable[[Any], Any], said: Any, last: Any) -> tuple[str, Any]:
        """Return what the model is told of its action, and the observation that counts now."""
        call = not isinstance(said, str)
        self._policy.facts["tool_calls"] += call
        try:
            action = act(said)
        except (ValidationError, ValueError) as error:
            self._policy.facts["tool_errors" if call else "unparsed"] += 1
            return f"Error: {_reason(error)}", last
        found = await self._do("step", action)
        self.steps += 1
        if found.reward is not None:
            self._policy.reward = float(found.reward) + float(self._policy.reward or 0.0)  # type: ignore[arg-type]
        if getattr(found, "error", None) is not None:
            self._policy.facts["tool_errors"] += 1
        return _shown(found), found

    async def _ways(self) -> tuple[list[dict[str, Any]] | None, Callable[[Any], Any]]:
        """Return the tools that the model is offered, None where it acts by text, and what makes an action of what it
        said.
        """
        if isinstance(self._made, self._mcp.MCPEnvironment):
            listed = await self._do("step", self._mcp.ListToolsAction())
            tools = [_definition(tool.name, tool.description, tool.input_schema) for tool in listed.tools]
            return tools, lambda call: self._mcp.CallToolAction(
                tool_name=call["function"]["name"], arguments=call["function"]["arguments"]
            )
        kind = _action_of(self._kind)
        fields = {name: field for name, field in kind.model_fields.items() if name != "metadata"}
        if [field.annotation for field in fields.values()] == [str]:
            return None, lambda text: kind(**{next(iter(fields)): text})
        schema = kind.model_json_schema()
        schema.get("properties", {}).pop("metadata", None)
        definition = _definition(ACT, schema.pop("description", "Act."), schema)
        return [definition], lambda call: kind.model_validate(_arguments(call))

    async def _do(self, what: str, *args: Any, **given: Any) -> Any:
        """Call ``reset`` or ``step``: where the environment waits by itself in this loop, else in its thread."""
        made, name = self._made, f"{what}_async"
        base: Any = importlib.import_module("openenv.core.env_server.interfaces").Environment
        if getattr(type(made), name) is not getattr(base, name):
            return await getattr(made, name)(*args, **given)
        return await self._apart(lambda: getattr(made, what)(*args, **given))

    async def _apart(self, do: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, do)


def _arguments(call: Mapping[str, Any]) -> Any:
    if (name := call["function"]["name"]) != ACT:
        raise ValueError(f"there is no tool {name!r}; there is {ACT}")
    return call["function"]["arguments"]


def _action_of(kind: Any) -> type[BaseModel]:
    """Return the class of the environment's actions, which its ``step`` or its bases name."""
    action: Any = importlib.import_module("openenv.core.env_server.types").Action
    named = [typing.get_type_hints(kind.step).get("action")]
    for base in getattr(kind, "__orig_bases__", ()):
        named += typing.get_args(base)[:1]
    for one in named:
        if isinstance(one, type) and issubclass(one, action) and one is not action:
            found: type[BaseModel] = one
            return found
    raise TypeError(
        f"{kind.__name__} doesn't say what its actions are: annotate them, def step(self, action: MyAction)"
    )


def _definition(name: str, description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": dict(schema)}}


def _shown(observation: Any) -> str:
    """Return an observation as the model sees it: the one text that it has, else its fields as JSON."""
    if hasattr(observation, "tool_name"):  # of a tool: its result, or why there is none
        if observation.error is not None:
            return f"Error: {observation.error.message}"
        content = getattr(observation.result, "content", None)
        texts = [block.text for block in content or () if hasattr(block, "text")]
        return "\n".join(texts) if texts else as_text(observation.result)
    fields = observation.model_dump(mode="json", exclude=set(_OWN))
    values = list(fields.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields, ensure_ascii=False)


def _with_text(task: Task, text: str) -> list[dict[str, Any]]:
    """Return the prompt with the first observation: in its last message, since two of a user don't follow each
    other.
    """
    messages = list(task.messages or [{"role": "user", "content": task.prompt}])
    if messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": text}]
    return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n{text}"}]


def _message_of(call: Mapping[str, Any] | None, text: str) -> dict[str, Any]:
    if call is None:
        return {"role": "user", "content": text}
    return {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": text}


def _reason(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
