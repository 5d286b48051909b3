"""Calls of Ray actors that end: with an answer, with the actor's own error, or with one that names who is gone."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tandem.base.errors import DeadlineError, DiedError, TandemError

REPLY_SECONDS = 60.0
"""A living actor answers within this time beyond what it was asked to wait: longer means that it is stuck."""

START_SECONDS = 300.0
"""A process that starts may take so long, with all that it imports on a busy machine."""

_LOOK_S = 0.5
_NUMBERS = itertools.count()


def import_ray() -> Any:
    """Import the package ray, which is an extra. Raises ``TandemError`` where it is missing."""
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise TandemError(
            "this run needs the package ray (runtime.name: ray): pip install 'tandem-rl[ray]', or write "
            "runtime.name: local and give each role one device"
        ) from error


def name_in_cluster(words: str) -> str:
    """Return a name for an actor or a placement group, as the dashboard shows it: ``words`` and what tells it from all
    others, such as one that has died and may still have its own.
    """
    return f"{words} ({os.getpid()}-{next(_NUMBERS)})"


def end_with_node() -> None:
    """End the process of this actor once the node's daemon, which started it, is gone. Ray itself takes seconds."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def work_beside(folder: str) -> None:
    """Let relative paths in this actor mean what they mean in the driver, where its ``folder`` is there too."""
    if os.path.isdir(folder):
        os.chdir(folder)
        sys.path.append(folder)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


@dataclass(frozen=True)
class Reply:
    """The answer to a call under way. ``awaited`` and ``who`` are for messages."""

    ref: Any
    awaited: str
    who: str
    died: type[DiedError] = DiedError

    def result(self, timeout: float | None = None) -> Any:
        """Return the answer, or raise what the actor raised.

        Raises ``DiedError`` (or the actor's kind of it) as soon as the actor is gone, ``TimeoutError`` where there is
        no answer after ``timeout`` seconds.
        """
        ray = import_ray()
        errors = ray.exceptions
        try:
            return ray.get(self.ref, timeout=timeout)
        except errors.RayTaskError as error:
            if isinstance(error.cause, errors.RayActorError | errors.ObjectLostError):
                gone = f"a process that {self.who} needs died. {_reason(error.cause)}"
                raise DiedError(f"{self.awaited}: {gone}") from error
            raise error.cause from error
        except (errors.RayActorError, errors.ObjectLostError, errors.RaySystemError) as error:
            raise self.died(f"{self.who} died while it was needed for {self.awaited}. {_reason(error)}") from error

    def within(self, seconds: float) -> Any:
        """Return ``result``, with a ``DeadlineError`` that names the actor where it takes longer."""
        try:
            return self.result(seconds)
        except TimeoutError as error:
            raise DeadlineError(
                f"waited {seconds:g} s for {self.awaited}; blocked by {self.who}, which does not answer"
            ) from error


@dataclass(frozen=True)
class Remote:
    """A Ray actor under a ``name`` for messages; ``died`` is the error that says that it is gone."""

    handle: Any
    name: str
    died: type[DiedError] = field(default=DiedError)

    def submit(self, method: str, *args: Any, awaited: str = "", group: str | None = None) -> Reply:
        """Start a call; calls of one caller start in this order. ``group``: the concurrency group that it runs in."""
        call = getattr(self.handle, method)
        ref = (call if group is None else call.options(concurrency_group=group)).remote(*args)
        return Reply(ref, awaited or f"the answer to {method}()", self.name, self.died)

    def ask(self, method: str, *args: Any, waits: float = 0.0, awaited: str = "", group: str | None = None) -> Any:
        """Call and wait. ``waits`` are the seconds that the actor may take by agreement."""
        return self.submit(method, *args, awaited=awaited, group=group).within(waits + REPLY_SECONDS)

    def kill(self) -> None:
        """End the actor's process now; harmless if it is gone."""
        import_ray().kill(self.handle)


class Pulse:
    """Signs of life of an actor: its method ``pid`` is asked again and again, one question at a time.

    ``group`` is a concurrency group of the actor in which nothing else is done, so that one at work answers too.
    """

    def __init__(self, remote: Remote, group: str | None = None) -> None:
        self._remote, self._group = remote, group
        self._asked: tuple[Reply, float] | None = None

    def look(self) -> None:
        """Take the answer if it is there, else ask; returns at once. Raises ``DiedError`` for an actor that is gone."""
        asked = self._asked
        if asked is None:
            asked = self._remote.submit("pid", awaited="a sign of life", group=self._group), time.monotonic()
            self._asked = asked
        with suppress(TimeoutError):
            asked[0].result(0.0)
            self._asked = None

    @property
    def silent_s(self) -> float:
        """Seconds for which the open question has had no answer."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - asked[1]


def _reason(error: Exception) -> str:
    """Return what Ray knows of a death, in one line: of a start that failed the error, else what happened to the
    process.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    if "creation task" in lines[0]:
        return f"It could not start: {lines[-1]}"
    causes = [line for line in lines if "exit" in line.lower() or "died" in line.lower()]
    return (causes or lines)[0]
