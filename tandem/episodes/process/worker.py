"""A process in which episodes run as coroutines, many at a time. It ends with its parent.

Messages are JSON both ways. In: ``begin`` an episode, an ``answer`` to its question or a ``part`` of it, ``cancel`` it.
Out: ``ready`` or ``broken``, an ``asks`` of an episode, an episode ``ended``. Whatever an episode prints goes to
standard error.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tandem.episodes.built_in import Episode, find_episode, prepare
from tandem.episodes.policy import Ask, EpisodeOver, Policy, Task
from tandem.episodes.servers import serving
from tandem.episodes.static import grades_itself
from tandem.episodes.text_stream import Hear
from tandem.episodes.toolbox import all_tools, together
from tandem.reward.outcome import Verdict, as_verdict, failed
from tandem.reward.process.lifeline import LastResort, clear, end_with
from tandem.reward.process.wire import pack_verdicts, receive, send
from tandem.reward.scoring import describe_error

_LENGTH = struct.Struct("!I")
_TOO_LATE = {"error": "the episode is over"}
_OF_START = 0.8  # of a process's time to get ready, for the servers of tools to start: later it is ended without a word
_UNNUMBERED = (
    "trainer.exact: an episode asks one thing at a time, or says of each which branch it is of, since which comes "
    "first is chance: chat(..., branch=1), with rollout.episode.branches; a program sends X-Tandem-Branch: 1"
)
_LAST_RESORT_S = 5.0  # beyond an episode's time, at which a living parent has ended this process


def main(fd: int, parent: int) -> None:
    """Serve until the parent closes the socket or is gone."""
    os.dup2(2, 1)
    channel = socket.socket(fileno=fd)
    first = receive(channel)
    if first is None:
        return
    setup = json.loads(first)
    last_resort = LastResort(setup["timeout_s"] + _LAST_RESORT_S)
    threading.Thread(target=end_with, args=(parent, last_resort), daemon=True).start()
    sys.path[:] = setup["path"]
    _restore_python_path(setup["pythonpath"])
    try:
        episode = find_episode(setup["type"], setup["file"])
        inspect.signature(episode).bind(None, None, **setup["parameters"])
        tools = all_tools(setup["tools"], setup["sandbox"])
        prepare(setup["type"], setup["file"], setup["parameters"], setup["concurrency"])
    except BaseException as error:
        send(channel, json.dumps({"kind": "broken", "text": describe_error(error)}).encode())
        return
    last_resort.arm()
    play = partial(episode, **setup["parameters"])
    policy = partial(
        Policy,
        sampling=setup["sampling"],
        exact=setup["exact"],
        rewards_turns=setup["turn_rewards"],
        branches=setup["branches"],
    )

    async def serve() -> None:
        try:
            found = together(tools, await serving(setup["servers"], setup["start_s"] * _OF_START))
        except Exception as error:
            send(channel, json.dumps({"kind": "broken", "text": describe_error(error)}).encode())
            os._exit(0)
        await Host(
            channel, play, partial(policy, tools=found), graded=grades_itself(episode), exact=setup["exact"]
        ).serve()

    asyncio.run(serve())


@dataclass(frozen=True)
class _Open:
    """A question under way; ``numbered``: it says which branch it is of."""

    waiting: asyncio.Future[dict[str, Any]]
    hear: Hear | None
    numbered: bool

    def settle(self, reply: dict[str, Any]) -> None:
        if not self.waiting.done():
            self.waiting.set_result(reply)


def _limit_in(value: Any) -> str | None:
    """Return the limit that has ended an episode, also where a group of tasks was ended by it; None for none."""
    if isinstance(value, BaseExceptionGroup):
        limits = [_limit_in(one) for one in value.exceptions]
        return None if None in limits else limits[0]
    return str(value) if isinstance(value, EpisodeOver) else None


def _restore_python_path(given: str | None) -> None:
    """Give what this process starts the caller's own PYTHONPATH: other interpreters have other packages."""
    if given is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = given


class Host:
    """The episodes of this process. ``episode`` takes a task and a policy; ``graded``: its rewards are its own.

    ``exact``: what is asked at once says which branch it is of.
    """

    def __init__(
        self, channel: socket.socket, episode: Episode, policy: Callable[[Ask], Policy], *, graded: bool, exact: bool
    ) -> None:
        self._channel, self._episode, self._policy, self._graded = channel, episode, policy, graded
        self._exact = exact
        self._plays: dict[str, asyncio.Task[None]] = {}
        self._open: dict[str, dict[int, _Open]] = {}  # by episode and mark
        self._branches: dict[str, set[asyncio.Task[Any]]] = {}  # that have asked with a number
        self._marks = itertools.count()

    async def serve(self) -> None:
        """Do what the parent says until it closes the line."""
        self._channel.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=self._channel)
        self._send(kind="ready")
        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                self._hear(json.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            clear()
            os._exit(0)  # threads of tools may go on for ever

    def _hear(self, message: dict[str, Any]) -> None:
        name = message["id"]
        match message["kind"]:
            case "begin":
                self._open[name], self._branches[name] = {}, set()
                self._plays[name] = asyncio.create_task(self._play(name, Task(**message["task"])))
            case "answer":
                asked = self._open.get(name, {}).pop(message["mark"], None)
                if asked is not None:
                    asked.settle(message["reply"])
            case "part":
                asked = self._open.get(name, {}).get(message["mark"])
                if asked is not None and asked.hear is not None:
                    asked.hear(message["part"])
            case "cancel":
                if name in self._plays:
                    self._plays[name].cancel()

    async def _play(self, name: str, task: Task) -> None:
        policy = self._policy(partial(self._ask, name))
        try:
            verdict = await self._verdict(name, task, policy)
        except asyncio.CancelledError:
            verdict = failed("cancelled")  # the parent knows why
        del self._plays[name]
        for branch in self._branches.pop(name):
            branch.cancel()
        for asked in self._open.pop(name).values():
            asked.settle(_TOO_LATE)
        packed = None if verdict is None else json.loads(pack_verdicts(0, [verdict], 0.0))
        turns = policy.turns_of_branches
        self._send(
            kind="ended", id=name, verdict=packed, facts=dict(policy.facts), turn_rewards=turns, leaked=policy.leaked
        )

    async def _verdict(self, name: str, task: Task, policy: Policy) -> Verdict | None:
        """Return how an episode ends. Branches that go on are waited for: which of them is first to see a limit or an
        error is a matter of time, and what they sample is not.
        """
        try:
            value: Any = await self._episode(task, policy)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also SystemExit and the like: only the episode fails
            value = error
        while going := {one for one in self._branches[name] if not one.done()} - {asyncio.current_task()}:
            await asyncio.wait(going)
        if (limit := _limit_in(value)) is not None:
            return self._until_now(policy, limit)
        if isinstance(value, BaseException):
            return failed(describe_error(value))
        try:
            value = policy.without_turns(value)
            return None if value is None else as_verdict(value)
        except Exception as error:
            return failed(describe_error(error))

    def _until_now(self, policy: Policy, limit: str) -> Verdict | None:
        """Return the verdict on an episode that a limit has ended; None: its last answer is to be scored.

        The reward manager's scale is not that of an episode which grades itself, so that one without a reward failed.
        """
        if policy.reward is not None:
            return as_verdict(policy.reward)
        if self._graded and any(policy.turn_rewards):
            return as_verdict(0.0)
        if self._graded:
            return failed(f"ended by the limit of {limit} before it had a reward: set policy.reward on the way")
        return None

    async def _ask(self, name: str, question: dict[str, Any], hear: Hear | None = None) -> dict[str, Any]:
        if name not in self._plays:
            return _TOO_LATE
        numbered, under_way = question.get("branch") is not None, self._open[name]
        if self._exact and under_way and not (numbered and all(one.numbered for one in under_way.values())):
            return {"error": _UNNUMBERED}
        if numbered and (task := asyncio.current_task()) is not None and task is not self._plays[name]:
            self._branches[name].add(task)
        mark, waiting = next(self._marks), asyncio.get_running_loop().create_future()
        under_way[mark] = _Open(waiting, hear, numbered)
        try:
            self._send(kind="asks", id=name, mark=mark, beside=len(under_way) > 1, **question)
            return await waiting  # type: ignore[no-any-return]
        finally:
            under_way.pop(mark, None)

    def _send(self, **message: Any) -> None:
        """Send a message. Raises ``TypeError`` for what JSON can't say, to the episode that gave it."""
        text = json.dumps(message).encode()
        self._writer.write(_LENGTH.pack(len(text)) + text)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    finally:
        clear()
