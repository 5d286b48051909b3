"""Waits of the actor's loop: none is silent, each ends, and what ended somebody else ends it at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar

from tandem.base.errors import DeadlineError, TandemError
from tandem.observe.status.status import Wait

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Watched(Protocol):
    """Somebody whom the actor's loop may wait for. ``Ranks`` watches over those of the actor."""

    def check(self) -> None:
        """Raise what ended it, if anything did."""

    def causes(self, partition: int) -> str:
        """Return what keeps it from having ``partition`` ready, in words; nothing where nothing does."""


class Ranks:
    """The ranks of a role that trains: one that is gone must end the run, one that is silent may block it."""

    def __init__(self, check: Callable[[], None], silent: Callable[[], list[str]]) -> None:
        self.check, self._silent = check, silent

    def causes(self, partition: int) -> str:
        """Return the ranks that give no sign of life; one that fails says so by ``check``."""
        del partition
        return "; ".join(self._silent())


class Waits:
    """Around the waits of ``loop``, as messages call it, for those whom it must ``watch``.

    One longer than ``warning_s`` is warned of while it lasts, with its cause; one for samples ends after
    ``deadline_s``.
    """

    def __init__(self, loop: str, *, warning_s: float, deadline_s: float) -> None:
        self._loop, self._warning_s, self.deadline_s = loop, warning_s, deadline_s
        self._watched: list[Watched] = []
        self._now: dict[object, tuple[str, float, Callable[[], str]]] = {}

    def watch(self, *others: Watched) -> None:
        """Look after them too while waiting for samples."""
        self._watched += others

    @contextmanager
    def stall_warning(self, doing: str, cause: Callable[[], str]) -> Iterator[Callable[[], str]]:
        """Watch a wait in which the loop is ``doing`` that. Gives the message."""
        place, own = f"{self._loop}{doing}", object()
        self._now[own] = place, time.monotonic(), cause
        try:
            with stall_warning(self._warning_s, place, cause) as message:
                yield message
        finally:
            del self._now[own]

    def now(self) -> list[Wait]:
        """Return what the loop waits for at this moment; for other threads, as a stall's warning is."""
        found = []
        for place, since, cause in list(self._now.values()):
            try:
                words = cause()
            except TandemError as error:  # who should say why doesn't answer either
                words = str(error)
            found.append(Wait(place, words, time.monotonic() - since))
        return found

    def until(self, attempt: Callable[[], T], partition: int, index: int = 0) -> T:
        """Repeat ``attempt`` while it raises ``DeadlineError`` after a moment, and look after everyone meanwhile."""
        started = time.monotonic()
        with self.stall_warning(
            f"(rollout_id={partition}) batch_index={index}", lambda: self.causes(partition)
        ) as message:
            while True:
                self.check()
                with suppress(DeadlineError):
                    return attempt()
                if time.monotonic() - started >= self.deadline_s:
                    raise DeadlineError(message())

    def check(self) -> None:
        """Raise what ended somebody, if anything did."""
        for one in self._watched:
            one.check()

    def causes(self, partition: int) -> str:
        """Return why ``partition`` isn't ready, in words: ranks that are silent, else all that has something to say."""
        return self.silent() or "; ".join(cause for one in self._watched if (cause := one.causes(partition)))

    def silent(self) -> str:
        """Return the ranks that give no sign of life, in words: whatever else is late is late because of them."""
        causes = [one.causes(0) for one in self._watched if isinstance(one, Ranks)]
        return "; ".join(cause for cause in causes if cause)


@contextmanager
def stall_warning(every_s: float, place: str, cause: Callable[[], str]) -> Iterator[Callable[[], str]]:
    """Warn during a wait: after each ``every_s`` seconds of it a warning says where the loop stands and why.

    Gives what says so at once. ``cause`` is called in a thread of its own.
    """
    started, over = time.monotonic(), threading.Event()

    def message() -> str:
        return f"{place} stalled for {time.monotonic() - started:.0f} seconds: {cause()}"

    def warn() -> None:
        while not over.wait(every_s):
            try:
                logger.warning(message())
            except TandemError as error:  # who should say why doesn't answer either
                logger.warning("%s stalled for %.0f seconds: %s", place, time.monotonic() - started, error)

    thread = threading.Thread(target=warn, name="stall-warning", daemon=True)
    thread.start()
    try:
        yield message
    finally:
        over.set()
