"""Fake engines of fixed durations over the real gate and the real ledger."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.simulate_clock import Clock, Process, Signal
from tandem.dataflow.gate import Closed, Gate
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.partition import Order
from tandem.dataflow.tickets import Lease, Request, Ticket

GENERATED = ("prompts", "responses", "response_mask", "rollout_logprobs", "token_versions", "truncated")
SCORED = ("rewards", "reward_valid")
LEASE_SECONDS = 1e9
_LATE = 1e-9  # seconds that rounding may leave of a generation


@dataclass(frozen=True)
class Rollouts:
    """The fake rollout side: ``engines`` devices that hold ``slots`` groups each; a group takes ``duration(ticket)``
    seconds whatever else its engine holds. ``refused(ticket)``: its group is dropped, and the ticket drawn again."""

    engines: int
    slots: int
    duration: Callable[[Ticket], float]
    drains: bool = False
    refused: Callable[[Ticket], bool] = lambda ticket: False


class Meter:
    """Processor seconds by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[name] += time.process_time() - began


class World:
    """One run without end: clock, gate, ledger, engines. The loops in ``simulate_loops`` are its actors."""

    def __init__(
        self,
        groups: int,
        samples: int,
        staleness: int,
        rollouts: Rollouts,
        meter: Meter,
        order: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        self.clock = Clock()
        self.groups = groups
        self.meter = meter
        self.rollouts = rollouts
        self.changed = Signal(self.clock)
        self.ended: list[float] = []  # when each step was trained
        self.lags: defaultdict[int, int] = defaultdict(int)  # lag -> groups trained with it
        self.gate = Gate(groups, staleness, order=order)  # without end: the last steps are like all others
        self.ledger = Ledger(
            groups,
            samples,
            capacity=groups * (staleness + 1),
            max_draws=10,
            settled_by=(*GENERATED, *SCORED),
        )
        self.engines = [Engine(self, f"rollout-{i}") for i in range(rollouts.engines)]
        self.versions: dict[Ticket, int] = {}  # of the groups in the ledger, at their first token

    # --- what engines do ---------------------------------------------------------------------------------------------

    def admit(self, engine: str) -> Ticket | None:
        """The gate's answer to an engine with a free slot."""
        with self.meter.timed("gate"):
            ticket = self.gate.admit(engine)
        if isinstance(ticket, Closed):
            return None
        with self.meter.timed("ledger"):
            self.ledger.assign(ticket, engine, self.clock.now)
        return ticket

    def store(self, ticket: Ticket, version: int) -> None:
        """A finished group, scored at once."""
        with self.meter.timed("ledger"):
            self.ledger.put(ticket, GENERATED, self.clock.now)
            refused = self.rollouts.refused(ticket)
            if refused:
                self.ledger.drop(ticket, "equal rewards", self.clock.now)
            else:
                self.ledger.put(ticket, SCORED, self.clock.now)
                self.versions[ticket] = version
        with self.meter.timed("gate"):
            self.gate.redraw(ticket) if refused else self.gate.done(ticket)
        if refused:
            self.wake_engines()
        self.changed.notify()

    def wake_engines(self) -> None:
        """Tickets may be free: whoever has room asks."""
        for engine in self.engines:
            engine.fill()

    # --- what consumers do -------------------------------------------------------------------------------------------

    def take(self, task: str, columns: Sequence[str], count: int, partition: int, order: Order) -> Process[Lease]:
        """Wait for groups, as ``LocalStore.take`` does: every change is a reason to look."""
        while True:
            with self.meter.timed("ledger"):
                request = Request(task, columns, count, partition, order, consumer="actor")
                lease = self.ledger.take(request, now=self.clock.now, seconds=LEASE_SECONDS)
            if lease is not None:
                return lease
            yield self.changed

    def give(self, lease: Lease, columns: Sequence[str]) -> None:
        """Add columns to the groups of a lease."""
        with self.meter.timed("ledger"):
            for ticket in lease.tickets:
                self.ledger.put(ticket, columns, self.clock.now)
        self.changed.notify()

    def acknowledge(self, lease: Lease) -> None:
        """The lease's groups are consumed."""
        with self.meter.timed("ledger"):
            self.ledger.acknowledge(lease, self.clock.now)

    def seal(self, partition: int) -> None:
        """All groups of the partition are there, and now final."""
        with self.meter.timed("ledger"):
            assert self.ledger.seal(partition, self.clock.now)

    def run(self, steps: int) -> None:
        """Let so many steps be trained."""
        self.clock.run(lambda: len(self.ended) >= steps)

    def retire(self, partition: int, tickets: Sequence[Ticket]) -> None:
        """The partition is trained; every sample must be accounted for."""
        for ticket in tickets:
            self.lags[partition - self.versions.pop(ticket)] += 1
        with self.meter.timed("ledger"):
            self.ledger.retire(partition)
            self.ledger.accounts().check()
        self.ended.append(self.clock.now)

    # --- weights -----------------------------------------------------------------------------------------------------

    def update_weights(self, version: int, seconds: float) -> Process[None]:
        """All engines stand for ``seconds``, then go on with ``version``; with ``drains`` they finish first."""
        for engine in self.engines:
            engine.close()
        if self.rollouts.drains:
            while any(engine.running for engine in self.engines):
                yield self.changed
        for engine in self.engines:
            engine.stand()
        yield seconds
        for engine in self.engines:
            with self.meter.timed("gate"):
                self.gate.acknowledge(engine.name, version)
            engine.version = version
            engine.open()
        self.wake_engines()
        self.changed.notify()

    def start(self) -> None:
        """All engines load version 0."""
        for engine in self.engines:
            self.gate.join(engine.name)
            self.gate.acknowledge(engine.name, 0)
        self.wake_engines()


class Engine:
    """One fake rollout engine. Its own time, in which groups end, stops while it stands."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.version = 0
        self.running = 0
        self._world = world
        self._closed = False
        self._standing_since: float | None = None
        self._stood = 0.0
        self._held: list[Callable[[], None]] = []

    def fill(self) -> None:
        """Take tickets while there are slots."""
        rollouts = self._world.rollouts
        while not self._closed and self.running < rollouts.slots:
            ticket = self._world.admit(self.name)
            if ticket is None:
                return
            self.running += 1
            self._end_at(ticket, self._time + rollouts.duration(ticket), self.version)

    def close(self) -> None:
        """Take no more tickets."""
        self._closed = True

    def stand(self) -> None:
        """Stop what is running, too."""
        self._standing_since = self._world.clock.now

    def open(self) -> None:
        """Go on."""
        assert self._standing_since is not None
        self._stood += self._world.clock.now - self._standing_since
        self._standing_since, self._closed = None, False
        held, self._held = self._held, []
        for end in held:
            end()

    @property
    def _time(self) -> float:
        now = self._world.clock.now if self._standing_since is None else self._standing_since
        return now - self._stood

    def _end_at(self, ticket: Ticket, end: float, version: int) -> None:
        """End the group when the engine's time is ``end``."""

        def due() -> None:
            left = end - self._time
            if left <= _LATE and self._standing_since is None:
                self.running -= 1
                self._world.store(ticket, version)
                self.fill()
            elif self._standing_since is None:
                self._world.clock.after(left, due)
            else:
                self._held.append(due)

        self._world.clock.after(end - self._time, due)
