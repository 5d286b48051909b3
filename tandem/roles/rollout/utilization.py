"""How long an engine works for each step: the rollout part of a step where generation goes on beside training."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.dataflow.tickets import Ticket


def wall() -> float:
    """Return a reading of the clock, in seconds of ``time.perf_counter``."""
    return time.perf_counter()


class StepClock:
    """Seconds of the run's steps: it stands between them. What goes on beside the loop is measured with it, since
    evaluations, checkpoints and logs come between steps and belong to none. For any threads; one of them runs it.
    """

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = 0.0, None  # replaced as one: seconds so far, when it began to run

    def __call__(self) -> float:
        """Return the seconds in which the clock has run."""
        seconds, since = self._state
        return seconds if since is None else seconds + wall() - since

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the clock for the time of the block."""
        self._state = self(), wall()
        try:
            yield
        finally:
            self._state = self(), None


@dataclass
class Work:
    """What an engine did for one partition.

    ``seconds``: its share of the time in which the engine was at work, by groups in flight; ``longest``: of the group
    that took the longest. It lay between ``begun`` and ``ended``, on the clock of ``time.perf_counter``.
    """

    begun: float
    ended: float
    seconds: float = 0.0
    longest: float = 0.0


class ScoringWait:
    """Seconds in which answers are being scored, no engine generates and no weights are pushed: what slow rewards add
    to a step. Engines that stand for a push would stand without rewards, and its seconds are a part of their own.

    ``clock`` gives the seconds that count. For any threads, and for all engines of a run.
    """

    def __init__(self, clock: Callable[[], float] = wall) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._generating: Counter[str] = Counter()  # engine -> groups
        self._blocked: dict[str, float] = {}  # engine -> since when
        self._blocked_s: defaultdict[str, float] = defaultdict(float)
        self._scoring = 0
        self._pushing = False
        self._seconds, self._counted = 0.0, clock()

    def generates(self, engine: str, change: int) -> None:
        """Note that ``engine`` has so many groups more, or fewer, in flight."""
        with self._lock:
            self._count()
            self._generating[engine] += change

    def scores(self, change: int) -> None:
        """Note that so many groups more, or fewer, wait for their scores."""
        with self._lock:
            self._count()
            self._scoring += change

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Note that weights are pushed in the block, and that nobody waits for scores meanwhile."""
        with self._lock:
            self._count()
            self._pushing = True
        try:
            yield
        finally:
            with self._lock:
                self._count()
                self._pushing = False

    @contextmanager
    def blocking(self, engine: str) -> Iterator[None]:
        """Time what ``engine`` waits for though it has groups in flight: a scoring in its own thread."""
        with self._lock:
            self._blocked[engine] = self._count()
        try:
            yield
        finally:
            with self._lock:
                self._blocked_s[engine] += self._count() - self._blocked.pop(engine)

    def blocked_s(self, engine: str) -> float:
        """Return the seconds for which ``engine`` was ``blocking`` so far: it has done no work in them."""
        with self._lock:
            now = self._count()
            return self._blocked_s[engine] + now - self._blocked.get(engine, now)

    def look(self) -> float:
        """Return the seconds since the last look."""
        with self._lock:
            self._count()
            seen, self._seconds = self._seconds, 0.0
            return seen

    def _count(self) -> float:
        now = self._clock()
        at_work = self._pushing or any(
            groups > 0 and engine not in self._blocked for engine, groups in self._generating.items()
        )
        if self._scoring > 0 and not at_work:
            self._seconds += now - self._counted
        self._counted = now
        return now


class Utilization:
    """Which groups an engine is at work on, and how long each partition has kept it busy. For any threads.

    Work is counted for the partition that it is for, whenever it is done: with staleness, before the step that trains
    on it. ``clock`` gives the seconds that count. ``note`` is told of groups more, or fewer, in flight.
    """

    def __init__(self, clock: Callable[[], float] = wall, note: Callable[[int], None] = lambda change: None) -> None:
        self._clock, self._note = clock, note
        self._lock = threading.Lock()
        self._begun: dict[Ticket, float] = {}
        self._in_flight: Counter[int] = Counter()  # partition -> groups
        self._counted = clock()  # up to which time is shared out
        self._since = wall()  # the same moment, for the timeline
        self._busy = self._longest = 0.0  # since the last look
        self._work: defaultdict[int, Work] = defaultdict(lambda: Work(self._since, self._since))

    def begin(self, group: Ticket) -> None:
        """Note that the group is being generated from now on."""
        with self._lock:
            # Noted first, and last in `end`: no moment between the two readings of the clock is one at work here and
            # one without work there, however long another thread has its turn between them.
            self._note(1)
            now = self._share_out()
            self._begun[group] = self._counted
            self._in_flight[group.partition] += 1
            self._work[group.partition].ended = now

    def end(self, group: Ticket) -> None:
        """Note that the group is generated, or given up."""
        with self._lock:
            now = self._share_out()
            begun = self._begun.pop(group, None)
            if begun is None:
                return
            self._in_flight[group.partition] -= 1
            work = self._work[group.partition]
            lasted = self._counted - begun
            work.ended, work.longest = now, max(work.longest, lasted)
            self._longest = max(self._longest, lasted)
            self._note(-1)

    def abandon(self) -> None:
        """Note that the engine is dead: nothing is generated from now on."""
        with self._lock:
            self._share_out()
            self._note(-len(self._begun))
            self._begun.clear()
            self._in_flight.clear()

    def look(self) -> tuple[float, float]:
        """Return the seconds at work since the last look, for whichever partitions, and those of the longest group that
        ended.

        Unlike those for a partition, seconds at work are never more than those that passed.
        """
        with self._lock:
            self._share_out()
            seen, self._busy, self._longest = (self._busy, self._longest), 0.0, 0.0
            return seen

    def take(self, partition: int) -> Work | None:
        """Return what was done for ``partition``, which is over; None where nothing was."""
        with self._lock:
            self._share_out()
            for group in [group for group in self._begun if group.partition <= partition]:
                del self._begun[group]
                self._note(-1)
            for number in [number for number in self._in_flight if number <= partition]:
                del self._in_flight[number]
            return self._work.pop(partition, None)

    def _share_out(self) -> float:
        """Give the time since the last look to the partitions in flight; now, for the timeline."""
        counted, busy = self._clock(), +self._in_flight
        for partition, groups in busy.items():
            self._work[partition].seconds += (counted - self._counted) * groups / busy.total()
        self._busy += (counted - self._counted) * bool(busy)
        self._counted, self._since = counted, wall()
        return self._since
