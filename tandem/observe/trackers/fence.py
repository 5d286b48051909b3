"""What a tracker is kept behind: it may raise, exit or hang, and the run goes on."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from tandem.base.hidden import hide
from tandem.observe.trackers.protocol import RunInfo, Tracker

logger = logging.getLogger(__name__)

MAX_FAILURES = 5
"""Failures in a row after which a tracker is given up."""

ROOM = 1000
"""What a tracker hasn't taken yet; more is not kept for it."""

HANG_S = 60.0
"""A tracker that has one thing in hand for so long hangs."""

Action = Callable[[Tracker], None]


class Guarded:
    """One tracker behind a fence: created late, created again while it fails, given up after ``MAX_FAILURES``.

    It is called by whoever calls this: the run itself.
    """

    def __init__(self, name: str, factory: Callable[[RunInfo], Tracker], run: RunInfo) -> None:
        self.name = name
        self._factory = factory
        self._run = run
        self._tracker: Tracker | None = None
        self._failures = 0

    def start(self) -> None:
        """Make the tracker at once."""
        self.attempt(lambda tracker: None)

    def give(self, action: Action) -> None:
        """Run ``action`` on the tracker."""
        self.attempt(action)

    def attempt(self, action: Action) -> None:
        """Run ``action`` on the tracker, which is made if it isn't there yet; an exception is counted, not raised."""
        if self._failures >= MAX_FAILURES:
            return
        try:
            if self._tracker is None:
                self._tracker = self._factory(self._run)
            action(self._tracker)
            self._failures = 0
        except (Exception, SystemExit) as error:  # SystemExit: some tracking services exit on a bad login
            self._failures += 1
            self._warn(error)

    def may(self, method: str) -> bool:
        """Return whether it has ``method``, or may have: one that a function makes is not known before it is there."""
        if self._failures:
            return False
        known = self._tracker if self._tracker is not None else self._factory
        return hasattr(known, method) or (known is self._factory and not inspect.isclass(self._factory))

    def end(self, action: Action) -> None:
        """End the tracker with ``action``, if it ever came up."""
        if self._tracker is not None:
            self.attempt(action)

    def settle(self, until: float) -> None:
        """Wait until it has done what it was given; nothing here: it did at once."""

    def _warn(self, error: BaseException) -> None:
        """Tell once that it fails and once that it is given up; the steps between stay quiet."""
        reason = hide(f"{type(error).__name__}: {error}")
        if self._failures == MAX_FAILURES:
            logger.warning("logger %r failed %d times in a row and is given up: %s", self.name, MAX_FAILURES, reason)
        elif self._failures == 1:
            logger.warning("logger %r failed and will be tried again (the run goes on): %s", self.name, reason)


class Beside(Guarded):
    """A tracker that a thread of its own calls, so that the run never waits for it.

    At most ``room`` things wait for it. One that has been busy with the same thing for ``hang_s`` seconds hangs: that
    is said once, and at the end of the run nobody waits for it.
    """

    def __init__(
        self,
        name: str,
        factory: Callable[[RunInfo], Tracker],
        run: RunInfo,
        *,
        room: int = ROOM,
        hang_s: float = HANG_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name, factory, run)
        self._room, self._hang_s, self._clock = room, hang_s, clock
        self._waiting: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._in_hand_since: float | None = None
        self._left_out = 0
        self._warned = False
        self._left_behind = False

    def start(self) -> None:
        """Start the thread, which makes the tracker."""
        self._waiting.append(super().start)
        threading.Thread(target=self._work, name=f"logger {self.name}", daemon=True).start()

    def give(self, action: Action) -> None:
        """Put ``action`` behind what waits; it is left out where there is no room."""
        self._put(lambda: self.attempt(action))

    def end(self, action: Action) -> None:
        """Put the end behind what waits."""
        self._put(lambda: super(Beside, self).end(action), at_any_rate=True)

    def settle(self, until: float) -> None:
        """Wait until all is done, at most ``until`` on the clock, and not for one that hangs; say what is lost."""
        with self._changed:
            while self._busy() and (left := until - self._clock()) > 0 and not self._hangs():
                self._changed.wait(min(left, 1.0))
            waiting = len(self._waiting) + (self._in_hand_since is not None)
            self._left_behind = waiting > 0
        if waiting and not self._warned:
            logger.warning("logger %r did not take all until the end of the run, and is left behind", self.name)
        elif self._left_out:
            logger.warning("logger %r was not told all: it was too slow for %d entries", self.name, self._left_out)

    def _put(self, work: Callable[[], None], *, at_any_rate: bool = False) -> None:
        with self._changed:
            fits = len(self._waiting) < self._room
            if fits or at_any_rate:
                self._waiting.append(work)
                self._changed.notify_all()
            else:
                self._left_out += 1
            hangs = self._hangs()
        if (hangs or not fits) and not self._warned:
            self._warned = True
            what = f"has not answered for {self._hang_s:g} s" if hangs else "is slower than the run"
            logger.warning(
                "logger %r %s: the run goes on without waiting, and what it can't take is left out", self.name, what
            )

    def _warn(self, error: BaseException) -> None:
        """Tell as above; what one that was left behind fails with, as the process ends around it, was said already."""
        if not self._left_behind:
            super()._warn(error)

    def _busy(self) -> bool:
        return bool(self._waiting) or self._in_hand_since is not None

    def _hangs(self) -> bool:
        since = self._in_hand_since
        return since is not None and self._clock() - since >= self._hang_s

    def _work(self) -> None:
        while True:
            with self._changed:
                self._in_hand_since = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting))
                work = self._waiting.popleft()
                self._in_hand_since = self._clock()
            work()
