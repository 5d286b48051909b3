"""The owner's end of the line to an engine's process: questions, answers, and whether the other side is well."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from tandem.base.deadline import Deadline
from tandem.base.errors import (
    ContractError,
    DataError,
    DeadlineError,
    EngineDiedError,
    EngineHungError,
    TandemError,
    UnknownNameError,
    sentences,
)
from tandem.rollout.wire import Line, Message
from tandem.transport.circle import BrokenCircleError

T = TypeVar("T")

_TICK_S = 0.5  # between looks at a process from which nothing comes
QUIET_S = 3.0
"""Silence that is worth a warning; a host gives a sign of life twice in a second."""
_ERRORS = {
    e.__name__: e for e in (BrokenCircleError, ContractError, DataError, DeadlineError, UnknownNameError, TandemError)
}


class EngineHost(Protocol):
    """The process of an engine as its owner sees it: ``HostProcess`` on this machine, ``ActorHost`` in an actor of
    Ray.
    """

    @property
    def channel(self) -> Line:
        """Our end of the line to it."""

    @property
    def pid(self) -> int:
        """The process id of the engine's process."""

    def ending(self) -> str:
        """Return how it ended, as the end of a sentence. Ends it, if it doesn't end by itself within a moment."""

    def kill(self) -> object:
        """End it at once, if it hasn't ended."""


@dataclass(frozen=True)
class Patience:
    """Seconds: for the process to start, for anything that is awaited, and without any sign of life."""

    start_s: float
    deadline_s: float
    silence_s: float


class Connection:
    """A host and the messages that came from it. One thread listens; any thread may ask and wait.

    Whoever waits gets ``EngineDiedError`` once the process has ended. One that has hung is ended, since nobody knows
    what it would do next, and its waiters get ``EngineHungError``, which is one too.
    """

    def __init__(self, name: str, host: EngineHost, patience: Patience) -> None:
        self._name, self._patience = name, patience
        self._numbers = itertools.count()
        self._news = threading.Condition()  # guards what follows; notified of every message
        self._boxes: dict[int, deque[Message]] = {}
        self._failure: tuple[type[TandemError], str] | None = None
        self._ready = self._paused = self._closing = False
        self._steps: int | None = None
        self._begun = self._heard = self._stepped = time.monotonic()
        self._host = host
        threading.Thread(target=self._listen, name=f"listen-to-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id of the engine's process."""
        return self._host.pid

    @property
    def steps(self) -> int:
        """Tokens made, as of the last sign of life; 0 where the engine doesn't count them."""
        return self._steps or 0

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life; 0 while the process starts."""
        return time.monotonic() - self._heard if self._ready else 0.0

    @property
    def starting(self) -> str:
        """Words that tell that the process starts; empty once it takes orders, or has failed."""
        if self._ready or self._failure is not None:
            return ""
        now, heard = time.monotonic(), self._heard
        sign = f"its last sign of life {now - heard:.0f} s ago" if heard > self._begun else "no sign of life yet"
        return f"is starting, for {now - self._begun:.0f} s of at most {self._patience.start_s:g} s, {sign}"

    def wait_until_ready(self) -> None:
        """Return once the process takes orders. Raises what its start raised.

        A start has a limit of its own, counted from its beginning, whoever waits for what meanwhile.
        """
        if not self._ready:
            with self._news:
                self._wait(lambda: self._ready, "its start", Deadline(self._patience.start_s, self._begun))

    @property
    def came_up(self) -> bool:
        """Whether the process has ever taken orders, also where it has ended since."""
        return self._ready

    @property
    def ready(self) -> bool:
        """Whether the process takes orders. Raises what its start raised."""
        self.check("its start")
        return self._ready

    def check(self, awaited: str) -> None:
        """Raise if the process has ended or was given up; ``awaited`` is for the message."""
        with self._news:
            self._check_alive(awaited)

    # --- messages ----------------------------------------------------------------------------------------------------

    def open(self) -> int:
        """Return a new number, under which answers are kept until ``drop``."""
        with self._news:
            number = next(self._numbers)
            self._boxes[number] = deque()
        return number

    def drop(self, number: int) -> None:
        """Forget ``number``, for which no more answers are wanted."""
        with self._news:
            self._boxes.pop(number, None)

    def send(
        self, kind: str, tensors: Mapping[str, torch.Tensor] | None = None, file: int | None = None, **fields: Any
    ) -> None:
        """Send, if the process still listens; that it doesn't is found by the listening thread."""
        with contextlib.suppress(OSError):
            self._host.channel.send(kind, tensors, file, **fields)

    def ask(
        self, kind: str, awaited: str, deadline_s: float | None = None, file: int | None = None, **fields: Any
    ) -> Message:
        """Send and wait for the answer. Raises the error that was answered."""
        self.wait_until_ready()
        number = self.open()
        try:
            self.send(kind, file=file, number=number, **fields)
            return self.answer(number, awaited, deadline_s)
        finally:
            self.drop(number)

    def answer(self, number: int, awaited: str, deadline_s: float | None = None) -> Message:
        """Return the next message under ``number``. Raises the error that was answered."""
        deadline = Deadline(self._patience.deadline_s if deadline_s is None else deadline_s)
        with self._news:
            box = self._boxes[number]
            self._wait(lambda: bool(box), awaited, deadline)
            message = box.popleft()
        if message.kind == "error":
            raise as_error(message)
        return message

    def collect(self, number: int, awaited: str, since: float, at_most_s: float | None) -> list[Message]:
        """Collect all messages under ``number``; waits for one, but with ``at_most_s`` only so many seconds.

        Tokens are owed ``since`` that time on the monotonic clock: one that makes none for too long has hung.
        """
        with self._news:
            box = self._boxes[number]
            limit = time.monotonic() + (float("inf") if at_most_s is None else at_most_s)
            while not box:
                self._check_alive(awaited)
                self._check_well(awaited, since)
                left = limit - time.monotonic()
                if left <= 0:
                    break
                self._news.wait(min(_TICK_S, left))
            messages = list(box)
            box.clear()
        return messages

    def set_paused(self, paused: bool) -> None:
        """Note whether no token is owed."""
        with self._news:
            self._paused, self._stepped = paused, time.monotonic()

    def close(self) -> None:
        """End the process: by itself if it does so at once, else by force."""
        with self._news:
            self._closing = True
            self._failure = self._failure or (TandemError, f"rollout engine {self._name!r} is closed")
            self._news.notify_all()
        self.send("close", number=-1)
        self._host.ending()
        self._host.channel.close()

    # --- waiting (with _news held) -----------------------------------------------------------------------------------

    def _wait(self, ready: Callable[[], bool], awaited: str, deadline: Deadline) -> None:
        while not ready():
            self._check_alive(awaited)
            self._check_well(awaited, None)
            if deadline.left == 0.0:
                self._give_up(f"did not give {awaited} in {deadline.seconds:g} s{self._quiet()}")
            self._news.wait(min(_TICK_S, deadline.left))

    def _check_alive(self, awaited: str) -> None:
        if self._failure is not None:
            error, text = self._failure
            raise error(sentences(text, f"Awaited was {awaited}") if issubclass(error, DeadlineError) else text)

    def _check_well(self, awaited: str, since: float | None) -> None:
        """Give up a process that gives no sign of life, or makes no token where tokens are owed ``since`` a time."""
        if not self._ready:
            return
        # After a suspension of this process itself the signs of life may be there, unread: look twice.
        if self._silent() and not self._news.wait_for(lambda: not self._silent(), 2 * _TICK_S):
            self._give_up(f"gave no sign of life for {self._patience.silence_s:g} s while {awaited} was awaited")
        owed = None if since is None or self._paused or self._steps is None else max(since, self._stepped)
        if owed is not None and time.monotonic() - owed > self._patience.deadline_s:
            self._give_up(
                f"made no token for {self._patience.deadline_s:g} s while {awaited} was awaited{self._quiet()}"
            )

    def _silent(self) -> bool:
        return self.silent_s > self._patience.silence_s

    def _quiet(self) -> str:
        """Return how long it has been silent, to end a sentence with, where that is out of the ordinary."""
        return f", and gave no sign of life for the last {self.silent_s:.0f} s" if self.silent_s > QUIET_S else ""

    def _give_up(self, what: str) -> None:
        if self._failure is None:
            self._failure = EngineHungError, f"{self._who()} {what}; it was alive, so it had hung and was ended"
            self._host.kill()
        self._news.notify_all()
        raise self._failure[0](self._failure[1])

    def _who(self) -> str:
        """Name the engine, and its process where it has one."""
        pid = self.pid
        return f"rollout engine {self._name!r} (process {pid})" if pid else f"rollout engine {self._name!r}"

    # --- the listening thread ----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while (message := self._host.channel.receive()) is not None:
            with self._news:
                self._heard = time.monotonic()
                self._hear(message)
                self._news.notify_all()
        if not self._closing:
            died = f"{self._who()} {self._host.ending()}"
            with self._news:
                self._failure = self._failure or (EngineDiedError, died)
                self._news.notify_all()

    def _hear(self, message: Message) -> None:
        match message.kind:
            case "ready":
                self._ready = True
            case "beat":
                if message.fields["steps"] != self._steps:
                    self._steps, self._stepped = message.fields["steps"], self._heard
            case "broken":
                error = as_error(message)
                self._failure = type(error), f"rollout engine {self._name!r} can't start: {error}"
            case _:
                box = self._boxes.get(message.fields["number"])
                if box is not None:  # else nobody wants it any more
                    box.append(message)


def as_error(message: Message) -> TandemError:
    """Return the error that a message reports."""
    return _ERRORS.get(message.fields["error"], TandemError)(message.fields["text"])
