"""What an episode is handed: its task, and the policy under training to talk to. Imports no torch.

An episode is ``async def NAME(task: Task, policy: Policy, *, ...parameters)``. It returns a reward (a number, or a dict
with ``score`` and further numbers, as a scorer does), or None: then the reward manager scores its last answer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.base.errors import TandemError
from tandem.episodes.text_stream import Hear
from tandem.episodes.tools import Tool, as_text
from tandem.reward.outcome import unusable


@dataclass(frozen=True)
class Task:
    """One row of the data, as an episode sees it.

    ``messages`` is the conversation of the prompt, None where it is plain text; ``prompt`` and ``prompt_ids`` are what
    the model would be given. ``seed`` is for what the episode draws itself: equal episodes have equal ones.
    """

    uid: str
    prompt: str
    prompt_ids: list[int]
    messages: list[dict[str, Any]] | None
    ground_truth: Any
    data_source: str
    extra_info: dict[str, Any]
    seed: int


@dataclass(frozen=True)
class Answer:
    """A turn of the model: the ``message`` to append to the messages, its ``content``, and what was sampled.

    ``calls`` are the tool calls of the message (OpenAI's form, arguments as a mapping), ``errors`` say why something in
    it was no call. ``finish_reason`` is ``length`` where the turn was cut by a limit. ``details`` are the number of
    tokens before it and, where they were asked for, their ids, and log-probs and texts of its own.
    """

    message: dict[str, Any]
    content: str
    calls: list[dict[str, Any]]
    errors: list[str]
    token_ids: list[int]
    finish_reason: str
    details: dict[str, Any] = field(default_factory=dict)


class PolicyError(TandemError):
    """The policy can't be asked this: the messages were changed, or the chat template refuses them."""


class EpisodeOver(BaseException):
    """The episode has reached a limit of turns or tokens; what it did until then counts. Not to be caught."""


Ask = Callable[..., Awaitable[dict[str, Any]]]
"""Sends a question to the driver and gives its answer; a second argument hears parts of it before."""


class Policy:
    """The policy under training, as one episode talks to it: one question at a time, or one in each of its branches.

    ``definitions`` are those of the tools that the config names, which ``chat`` offers unless told otherwise.
    ``reward`` is the episode's to set: what it is worth so far, which counts where a limit ends it. ``sampling``: the
    temperature and top_p that turns are drawn with. ``exact``: the run can be repeated bit by bit. ``branches``: so
    many may go on side by side. ``turns_of_branches``: what ``reward_turn`` gave to each turn of each so far.
    """

    def __init__(
        self,
        ask: Ask,
        tools: Mapping[str, Tool],
        sampling: Mapping[str, float],
        *,
        exact: bool = False,
        rewards_turns: bool = False,
        branches: int = 1,
    ) -> None:
        self.sampling, self.exact, self.branches = sampling, exact, branches
        self.turns_of_branches: dict[int, list[float]] = {}
        self._rewards_turns = rewards_turns
        self.reward: float | Mapping[str, Any] | None = None
        self.definitions = [tool.definition for tool in tools.values()]
        self.facts: Counter[str] = Counter()
        self.leaked = False  # a thread of a tool goes on though nobody waits for it
        self._ask, self._tools = ask, tools

    @property
    def turn_rewards(self) -> list[float]:
        """What ``reward_turn`` gave to each turn so far, branch by branch."""
        return [reward for number in sorted(self.turns_of_branches) for reward in self.turns_of_branches[number]]

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        branch: int | None = None,
    ) -> Answer:
        """Ask for the model's next turn after ``messages``, which begin with those of the chats before.

        ``tools`` are definitions for the first turn, by default the config's; they stay. ``branch``: the number of a
        conversation of its own, in which alone the messages go on, and whose turns may be asked for while those of
        others are. Raises ``PolicyError`` for messages that were changed.
        """
        given = None if tools is None else [dict(tool) for tool in tools]
        question = {"op": "chat", "messages": list(messages), "tools": given, "branch": branch}
        return self._answer(await self._ask(question))

    async def generate(self, token_ids: Sequence[int], *, branch: int | None = None) -> Answer:
        """Ask for the model's next tokens after ``token_ids``, which begin with all those of the turns before.
        ``branch``: see ``chat``.
        """
        ids = [int(token) for token in token_ids]
        return self._answer(await self._ask({"op": "generate", "token_ids": ids, "branch": branch}))

    async def ask(self, question: Mapping[str, Any], hear: Hear | None = None) -> Answer:
        """Ask as ``chat`` and ``generate`` do, or for what follows a text (``complete``), with options: ``max_tokens``,
        ``stop``, ``seed``, ``details``, ``branch``. ``hear`` is given parts of the answer as they are drawn.
        """
        if hear is None:
            return self._answer(await self._ask(dict(question)))
        return self._answer(await self._ask({**question, "stream": True}, hear))

    def reward_turn(self, reward: float, turn: int | None = None, *, branch: int = 0) -> None:
        """Add ``reward`` to that of the last turn of a ``branch``, or of the ``turn`` with this number, from 1 on. The
        episode's own reward comes on top.

        Raises ``ValueError`` for what is no reward, for a turn that wasn't, and where no turn is rewarded.
        """
        if not self._rewards_turns:
            raise ValueError(
                "turns are rewarded one by one only with rollout.episode.turn_rewards: true; else return the sum"
            )
        worth = self.turns_of_branches.get(branch, [])
        place = len(worth) if turn is None else turn
        if not 1 <= place <= len(worth):
            where = f" in branch {branch}" if branch else ""
            raise ValueError(f"there is no turn {place}: the model has been asked {len(worth)} times{where}")
        number = float(reward)
        if (wrong := unusable(worth[place - 1] + number)) is not None:
            raise ValueError(f"the reward of turn {place} is {wrong}")
        worth[place - 1] += number

    def without_turns(self, value: Any) -> Any:
        """Return what an episode returned without its ``turn_rewards``, one for each turn, branch by branch, which are
        taken.
        """
        if not isinstance(value, Mapping) or "turn_rewards" not in value:
            return value
        given = value["turn_rewards"]
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != len(self.turn_rewards):
            shown = f"{len(given)} of them" if isinstance(given, list) else f"a {type(given).__name__}"
            raise ValueError(f"turn_rewards is a list with one for each of {len(self.turn_rewards)} turns, not {shown}")
        places = [(branch, turn) for branch in sorted(self.turns_of_branches) for turn in self._turns(branch)]
        for (branch, turn), reward in zip(places, given, strict=True):
            self.reward_turn(reward, turn, branch=branch)
        return {key: item for key, item in value.items() if key != "turn_rewards"}

    def _turns(self, branch: int) -> range:
        return range(1, len(self.turns_of_branches[branch]) + 1)

    async def call(self, call: Mapping[str, Any], *, timeout_s: float = 10.0) -> dict[str, Any]:
        """Run the tool that the model ``call``s; return the message that tells it the result, or what went wrong."""
        name, given = call["function"]["name"], call["function"]["arguments"]
        started = time.monotonic()
        self.facts["tool_calls"] += 1
        try:
            text = await self._run(name, given, timeout_s)
        except (Exception, SystemExit) as error:  # the user's tool: whatever it raises is an answer to the model
            self.facts["tool_errors"] += 1
            text = f"Error: {error}" if isinstance(error, ValueError) else f"Error: {type(error).__name__}: {error}"
        self.facts["tool_ms"] += round((time.monotonic() - started) * 1000)
        return {"role": "tool", "name": name, "tool_call_id": call["id"], "content": text}

    async def _run(self, name: str, given: Mapping[str, Any], timeout_s: float) -> str:
        if name not in self._tools:
            raise ValueError(f"there is no tool {name!r}; there are {', '.join(self._tools) or 'none'}")
        tool = self._tools[name]
        arguments = tool.bind(given)
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return as_text(await (tool.function(**arguments) if tool.is_async else _in_thread(tool, arguments)))
        except TimeoutError:
            if limit.expired():
                self.leaked = self.leaked or not tool.is_async
                raise ValueError(f"{name} gave no result in {timeout_s:g} s") from None
            raise
        except asyncio.CancelledError:
            self.leaked = self.leaked or not tool.is_async
            raise

    def _answer(self, reply: Mapping[str, Any]) -> Answer:
        if "over" in reply:
            raise EpisodeOver(reply["over"])
        if "error" in reply:
            raise PolicyError(reply["error"])
        found = Answer(**reply)
        worth = self.turns_of_branches.setdefault(found.details.get("branch", 0), [])
        worth += [0.0] * (found.details.get("turn", 0) - len(worth))
        self.facts["unparsed"] += len(found.errors)
        return found


async def _in_thread(tool: Tool, arguments: Mapping[str, Any]) -> Any:
    """Run a tool that is not async in a thread of its own: however long it takes, other episodes go on."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(error: BaseException | None, value: Any) -> None:
        if done.done():  # nobody waits any more
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}"))

    def run() -> None:
        error: BaseException | None = None
        value = None
        try:
            value = tool.function(**arguments)
        except BaseException as found:  # handed to whoever called
            error = found
        loop.call_soon_threadsafe(settle, error, value)

    threading.Thread(target=run, daemon=True, name=f"tool-{tool.definition['function']['name']}").start()
    return await done
