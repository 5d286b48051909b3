"""A simulated clock: processes that sleep and wait, one at a time, in the order of their time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from tandem.base.errors import DeadlineError

T = TypeVar("T")


class Signal:
    """What processes wait for; each ``notify`` wakes all that wait now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: list[Callable[[], None]] = []

    def wait(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` at the next ``notify``."""
        self._waiting.append(wake)

    def notify(self) -> None:
        """Wake everyone, at this time, after what is running now."""
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            self._clock.after(0.0, wake)


Process: TypeAlias = Generator[float | Signal, None, T]
"""Yields seconds to sleep, or a signal to wait for."""


class Clock:
    """Simulated seconds from 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self._serial = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call back in so many seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._serial), call))

    def spawn(self, process: Process[None]) -> None:
        """Run a process from now on."""
        self.after(0.0, lambda: self._resume(process))

    def run(self, until: Callable[[], bool]) -> None:
        """Let time pass until ``until`` holds. Raises ``DeadlineError`` where everyone waits for someone else."""
        while not until():
            if not self._events:
                raise DeadlineError(f"nothing will happen any more after {self.now:.3f} simulated seconds")
            self.now, _, call = heapq.heappop(self._events)
            call()

    def _resume(self, process: Process[None]) -> None:
        try:
            wanted = next(process)
        except StopIteration:
            return
        if isinstance(wanted, Signal):
            wanted.wait(lambda: self._resume(process))
        else:
            self.after(wanted, lambda: self._resume(process))
