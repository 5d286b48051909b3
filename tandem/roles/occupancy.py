"""How long an engine is at work: the rollout part of a step in modes where generation goes on beside training."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable


class Occupancy:
    """Seconds in which at least one group was generated, and the longest that a group took. For any threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[Hashable, float] = {}
        self._since = 0.0  # when the seconds that are not in _busy yet began, while anything is generated
        self._busy = 0.0
        self._longest = 0.0

    def begin(self, group: Hashable) -> None:
        """The group is being generated from now on."""
        with self._lock:
            now = time.monotonic()
            if not self._begun:
                self._since = now
            self._begun[group] = now

    def end(self, group: Hashable) -> None:
        """The group is generated."""
        with self._lock:
            now = time.monotonic()
            self._longest = max(self._longest, now - self._begun.pop(group))
            if not self._begun:
                self._busy += now - self._since

    def take(self) -> tuple[float, float]:
        """Busy seconds, and seconds of the longest group that ended, since the last call."""
        with self._lock:
            if self._begun:
                now = time.monotonic()
                self._busy, self._since = self._busy + now - self._since, now
            taken = self._busy, self._longest
            self._busy = self._longest = 0.0
            return taken
