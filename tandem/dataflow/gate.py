"""The staleness gate: which ticket may be filled now, by which engine, and if none, why not.

Weights version v exists after v partitions are finished. A ticket of partition k is admitted only while
``k - published <= max_staleness``, to an engine whose own version is at least ``k - max_staleness``. Versions only grow
and the group goes to *its* partition however late it finishes, so every token of every sample obeys the bound.

Rollout loops ask for tickets, the trainer publishes, and everyone may wait for a change, each in a thread of its own.
What the gate decides follows from the calls in their order alone; it looks at no clock.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from tandem.base.errors import ContractError
from tandem.dataflow.tickets import Ticket

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Closed:
    """Why no ticket is given.

    ``awaited_version`` is the version that opens the gate (None if no version will) and ``awaited_from`` the engines
    that have yet to acknowledge it. ``exhausted``: nothing is left to give, unless a ticket comes back.
    """

    reason: str
    awaited_version: int | None = None
    awaited_from: tuple[str, ...] = ()
    exhausted: bool = False

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class AtGate:
    """An engine as the gate sees it: the ``version`` that it has acknowledged, why it is ``paused`` (empty: it isn't),
    the ``tickets`` that it has in hand.
    """

    version: int | None
    paused: str
    tickets: tuple[Ticket, ...]


def _asks(method: Callable[Concatenate[Gate, P], T]) -> Callable[Concatenate[Gate, P], T]:
    """Let one thread in at a time."""

    @wraps(method)
    def locked(gate: Gate, /, *args: P.args, **options: P.kwargs) -> T:
        with gate._changed:
            return method(gate, *args, **options)

    return locked


def _changes(method: Callable[Concatenate[Gate, P], T]) -> Callable[Concatenate[Gate, P], T]:
    """Let one thread in at a time, and have those who ``wait`` look again afterwards."""

    @wraps(method)
    def locked(gate: Gate, /, *args: P.args, **options: P.kwargs) -> T:
        with gate._changed:
            try:
                return method(gate, *args, **options)
            finally:
                gate._changed.notify_all()

    return locked


class Gate:
    """Scheduler of tickets, ``tickets`` to a partition, partitions ``first`` to ``last`` - 1 (None: without end).

    ``open_tickets`` are those left over from partitions that began before a restart; fresh ones start at ``first``.
    An engine counts as live from its first ``acknowledge`` on: a late joiner loads before it works. ``even`` gives
    fresh tickets only to engines that have no more in hand than the mean of those at work, so that the first to ask
    does not take all. ``capacity`` (None: what staleness admits) bounds the groups of unfinished partitions that are
    stored or being made: a group is begun only if it will have its place, so that no engine is left with a finished
    one that it can't put down while it owes others of the partition that is waited for. ``order`` says of a partition
    in which order its places are given (None: as they are numbered); it is asked when the first of them is.
    """

    def __init__(
        self,
        tickets: int,
        max_staleness: int,
        *,
        first: int = 0,
        last: int | None = None,
        open_tickets: Iterable[Ticket] = (),
        even: bool = False,
        capacity: int | None = None,
        order: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        if tickets < 1 or max_staleness < 0:
            raise ContractError(f"gate: tickets={tickets} must be positive, max_staleness={max_staleness} not negative")
        self._changed = threading.Condition()
        if capacity is not None and capacity < tickets:
            raise ContractError(f"gate: capacity {capacity} groups can't hold one partition of {tickets}; raise it")
        self._capacity = capacity
        self.max_staleness = max_staleness
        self.tickets = tickets
        self._last = last
        self._fresh = Ticket(first, 0)  # the next by its number in line: with an order that is not its place
        self._order = order
        self._places: Sequence[int] = ()  # of the partition of ``_fresh``, in their order, once one was given
        self._refills: list[Ticket] = []  # heap; entries that are not in _waiting are skipped when met
        self._waiting: set[Ticket] = set()
        self._versions: dict[str, int | None] = {}  # engine -> acknowledged version; None: joined, nothing loaded yet
        self._gone: set[str] = set()  # engines that left, and may be heard of once more
        self._paused: dict[str, str] = {}  # engine -> why
        self._out: dict[Ticket, str] = {}  # ticket -> engine
        self._even = even
        self._in_hand: Counter[str] = Counter()  # engine -> tickets of _out
        self._published: int | None = None
        self._unpublished: dict[tuple[int, int], Closed] = {}  # (partition, version needed) -> answer: many ask
        for ticket in open_tickets:
            if ticket.partition >= first:
                raise ContractError(f"{ticket} would be given twice: fresh tickets start at partition {first}")
            self._refill(ticket)

    # --- engines -----------------------------------------------------------------------------------------------------

    @property
    @_asks
    def published(self) -> int | None:
        """The lowest version acknowledged by all live engines; it never falls. None before the first."""
        return self._published

    @_changes
    def join(self, engine: str) -> None:
        """Add a new engine, which gets no ticket before it has acknowledged a version."""
        if engine in self._versions:
            raise ContractError(f"engine {engine!r} is there already; an engine that restarts leaves first")
        self._gone.discard(engine)
        self._versions[engine] = None

    @_changes
    def acknowledge(self, engine: str, version: int) -> None:
        """Note that the engine generates with ``version`` from now on. This means nothing for one that died once it had
        loaded it.
        """
        if engine in self._gone:
            return
        own = self._version(engine)
        if version < 0 or (own is not None and version < own):
            raise ContractError(f"engine {engine!r} acknowledged version {version} after {own}; versions only grow")
        self._versions[engine] = version
        self._publish()

    @_changes
    def leave(self, engine: str, generated: Collection[Ticket] = ()) -> list[Ticket]:
        """Note that the engine is gone or dead: its tickets, same attempts, are given to others.

        Those in ``generated`` stay out, since only their rewards are missing, and end with ``done`` or ``redraw``.
        """
        self._version(engine)
        del self._versions[engine]
        self._gone.add(engine)
        self._paused.pop(engine, None)
        held = (ticket for ticket, holder in self._out.items() if holder == engine)
        lost = sorted(ticket for ticket in held if ticket not in generated)
        for ticket in lost:
            self.give_back(ticket)
        self._publish()
        return lost

    @_changes
    def pause(self, engine: str, why: str) -> None:
        """Give the engine no tickets until ``resume``, as in a weight update. One that has left gets none anyway."""
        if engine not in self._gone:
            self._version(engine)
            self._paused[engine] = why

    @_changes
    def resume(self, engine: str) -> None:
        """Let the engine take tickets again."""
        self._paused.pop(engine, None)

    @_asks
    def engines(self) -> dict[str, AtGate]:
        """Return all engines that are there, by name."""
        held: dict[str, list[Ticket]] = {name: [] for name in self._versions}
        for ticket, engine in self._out.items():
            if engine in held:
                held[engine].append(ticket)
        return {
            name: AtGate(version, self._paused.get(name, ""), tuple(sorted(held[name])))
            for name, version in self._versions.items()
        }

    # --- tickets -----------------------------------------------------------------------------------------------------

    @_asks
    def admit(self, engine: str) -> Ticket | Closed:
        """Return the next ticket for ``engine``: of the earliest partition, refills first; or why there is none."""
        own = self._version(engine)
        ticket = self._next()
        if ticket is None:
            return Closed("every ticket is given out", exhausted=True)
        closed = self._closed(engine, own, ticket)
        if closed is not None:
            return closed
        if ticket not in self._waiting:
            if self._even and (others := self._less_in_hand(engine)) is not None:
                return others
            ticket = self._give_fresh()
        self._waiting.discard(ticket)
        self._out[ticket] = engine
        self._in_hand[engine] += 1
        return ticket

    @_asks
    def closed(self, engine: str) -> Closed | None:
        """Return why ``engine`` would be given no ticket now; None if it would."""
        own, ticket = self._version(engine), self._next()
        if ticket is None:
            return Closed("every ticket is given out", exhausted=True)
        return self._closed(engine, own, ticket)

    @_changes
    def done(self, ticket: Ticket) -> None:
        """Note that the ticket's group is stored. Harmless if it was done before: an engine given up may still
        deliver.
        """
        self._end(ticket)
        self._waiting.discard(ticket)

    @_changes
    def take_over(self, ticket: Ticket, engine: str) -> None:
        """Note that ``engine`` fills the ticket, whichever had it in hand, or none: it ends with ``done`` or
        ``redraw``.
        """
        self.done(ticket)
        self._out[ticket] = engine
        self._in_hand[engine] += 1

    @_changes
    def redraw(self, ticket: Ticket) -> Ticket:
        """Note that the ticket's group was dropped, whether still out or stored already: the next attempt will be
        given.
        """
        self.done(ticket)
        refill = Ticket(ticket.partition, ticket.place, ticket.attempt + 1)
        if refill not in self._out:
            self._refill(refill)
        return refill

    @_changes
    def give_back(self, ticket: Ticket) -> None:
        """Note that the ticket was not filled: the *same* attempt will be given again."""
        if not self._end(ticket):
            raise ContractError(f"{ticket} isn't out; tickets come from admit()")
        self._refill(ticket)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Sleep until something changes (or until ``until`` holds), at most ``seconds``; whether it did."""
        with self._changed:
            return self._changed.wait(seconds) if until is None else self._changed.wait_for(until, seconds)

    @_changes
    def wake(self) -> None:
        """Have those who ``wait`` look again, e.g. because the run ends."""

    # --- inside ------------------------------------------------------------------------------------------------------

    def _version(self, engine: str) -> int | None:
        if engine not in self._versions:
            raise ContractError(
                f"engine {engine!r} is unknown to the gate; it knows {sorted(self._versions)}. Join first"
            )
        return self._versions[engine]

    def _end(self, ticket: Ticket) -> bool:
        """Take the ticket out of whatever hand holds it; says whether one did."""
        engine = self._out.pop(ticket, None)
        if engine is not None:
            self._in_hand[engine] -= 1
        return engine is not None

    def _less_in_hand(self, engine: str) -> Closed | None:
        """Return why others come first, if they do: the engine has more in hand than the mean of those at work."""
        at_work = [name for name, own in self._versions.items() if own is not None and name not in self._paused]
        if self._in_hand[engine] * len(at_work) <= sum(self._in_hand[name] for name in at_work):
            return None
        return Closed(f"engine {engine!r} has {self._in_hand[engine]} tickets in hand, others have fewer")

    def _publish(self) -> None:
        self._unpublished.clear()
        live = [version for version in self._versions.values() if version is not None]
        if live:
            self._published = max(min(live), -1 if self._published is None else self._published)

    def _next(self) -> Ticket | None:
        """Return the first ticket in line, admitted or not; None if there will be no more."""
        while self._refills and self._refills[0] not in self._waiting:
            heapq.heappop(self._refills)
        if self._refills:
            return self._refills[0]
        return self._fresh if self._last is None or self._fresh.partition < self._last else None

    def _give_fresh(self) -> Ticket:
        """Return the next ticket in line that was never given, with its place."""
        partition, number, _ = self._fresh
        if number == 0:
            self._places = range(self.tickets) if self._order is None else self._order(partition)
            if sorted(self._places) != list(range(self.tickets)):
                raise ContractError(f"gate: {list(self._places)} is no order of the places 0 to {self.tickets - 1}")
        wraps = number + 1 == self.tickets
        self._fresh = Ticket(partition + 1, 0) if wraps else Ticket(partition, number + 1)
        return Ticket(partition, self._places[number])

    def _refill(self, ticket: Ticket) -> None:
        if ticket not in self._waiting:
            self._waiting.add(ticket)
            heapq.heappush(self._refills, ticket)

    def _closed(self, engine: str, own: int | None, ticket: Ticket) -> Closed | None:
        if engine in self._paused:
            return Closed(f"engine {engine!r} is paused: {self._paused[engine]}")
        partition = ticket.partition
        fresh = max(0, partition - self.max_staleness)
        needed = fresh if ticket in self._waiting else max(fresh, self._room_from(ticket))  # a refill had its room
        if own is None:
            return Closed(f"engine {engine!r} has loaded no weights yet", needed, (engine,))
        if self._published is None or self._published < needed:
            if (partition, needed) not in self._unpublished:
                self._unpublished[partition, needed] = self._awaiting(partition, needed, fresh)
            return self._unpublished[partition, needed]
        if own < needed:
            return Closed(
                f"engine {engine!r} is at version {own}, partition {partition} needs {needed}", needed, (engine,)
            )
        return None

    def _room_from(self, ticket: Ticket) -> int:
        """Return the version with which there is room for a fresh ticket: all partitions below it are over and hold
        nothing.
        """
        if self._capacity is None:
            return 0
        beyond = ticket.partition * self.tickets + ticket.place - self._capacity
        return max(0, beyond // self.tickets + 1)

    def _awaiting(self, partition: int, needed: int, fresh: int) -> Closed:
        behind = tuple(sorted(name for name, v in self._versions.items() if v is not None and v < needed))
        why = f"max_staleness {self.max_staleness}" if needed == fresh else f"room for {self._capacity} groups"
        return Closed(
            f"partition {partition} needs version {needed} published ({why}), {self._published} is; "
            f"awaited from {', '.join(behind)}",
            needed,
            behind,
        )
