"""Whose turn it is between two tokens: generation's, or that of somebody who pauses it or changes the weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem.base.errors import DeadlineError


class DecodeLock:
    """Lets tokens be made one at a time; a change that waits goes before the next token.

    ``patience``: seconds that any wait may last. ``aborts`` counts the orders to end what is in flight, ``steps`` the
    tokens made.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._turn = threading.Condition()
        self._paused = False
        self._making = False
        self._waiting = 0  # changes that wait
        self._changing = False
        self.aborts = 0
        self.steps = 0

    @contextmanager
    def token(self, aborts: int) -> Iterator[bool]:
        """Hold the lock for one token's time, in which nobody pauses the engine or changes its weights.

        Gives False, without waiting, where an abort was ordered since ``aborts``: then no token may be made.
        """
        with self._turn:
            free = self._wait(lambda: self.aborts != aborts or self._free())
            if not free:
                raise DeadlineError(
                    f"generation waited {self._patience:g} s at a token boundary; blocked by {self._blocker()}"
                )
            going = self.aborts == aborts
            self._making = self._making or going
        try:
            yield going
        finally:
            if going:
                with self._turn:
                    self._making = False
                    self.steps += 1
                    self._turn.notify_all()

    @contextmanager
    def change(self, patience: float | None = None) -> Iterator[None]:
        """Hold the lock for a time in which no token is made; also while paused."""
        with self._turn:
            self._waiting += 1
            free = self._wait(lambda: not self._making and not self._changing, patience)
            self._waiting -= 1
            if not free:
                self._turn.notify_all()
                raise DeadlineError(
                    f"a change of the weights waited {self._patience if patience is None else patience:g} s for a "
                    f"token boundary; blocked by {'another change' if self._changing else 'a token that is being made'}"
                )
            self._changing = True
        try:
            yield
        finally:
            with self._turn:
                self._changing = False
                self._turn.notify_all()

    def pause(self, abort: bool) -> None:
        """Return once no token is being made; none is made until ``resume``."""
        with self._turn:
            self._paused = True
            self.aborts += abort
            self._turn.notify_all()
            if not self._wait(lambda: not self._making):
                raise DeadlineError(f"pause() waited {self._patience:g} s; blocked by a token that is being made")

    def resume(self) -> None:
        """End the pause: tokens may be made again."""
        with self._turn:
            self._paused = False
            self._turn.notify_all()

    def _free(self) -> bool:
        return not (self._paused or self._making or self._changing or self._waiting)

    def _wait(self, ready: Callable[[], bool], patience: float | None = None) -> bool:
        return self._turn.wait_for(ready, self._patience if patience is None else patience)

    def _blocker(self) -> str:
        if self._paused:
            return "a pause() without resume()"
        return "a load() that doesn't end" if self._changing else "another generate() whose token doesn't end"
