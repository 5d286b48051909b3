"""Work that the loop needn't wait for: done in its order by a thread that exists while there is some."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Background:
    """Does pieces of work one after the other, beside whoever gives them; at most ``room`` of them wait.

    The thread ends when nothing is left, so that there is none between two steps, and none to be closed. What a piece
    raises is logged: who wants to know more catches it inside.
    """

    def __init__(self, name: str, room: int) -> None:
        self._name, self._room = name, room
        self._waiting: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._working = False

    def give(self, work: Callable[[], None], patience: float) -> bool:
        """Take ``work``, after up to ``patience`` seconds where there is no room; return whether it was taken."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._waiting) < self._room, patience):
                return False
            if not self._working:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._working = True
            self._waiting.append(work)
        return True

    def settle(self, patience: float) -> bool:
        """Wait until all that was given is done, up to ``patience`` seconds; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._working, patience)

    def _work(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except Exception:
                logger.exception("%s: what was given to it failed", self._name)

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            work = self._waiting.popleft() if self._waiting else None
            self._working = work is not None
            self._changed.notify_all()
            return work
