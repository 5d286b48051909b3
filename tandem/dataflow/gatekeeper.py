"""The gate shared by threads: rollout loops ask for tickets, the trainer publishes, everyone may wait for a change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

from tandem.dataflow.gate import Closed, Gate, Holding
from tandem.dataflow.tickets import Ticket


class GateKeeper:
    """``Gate`` behind a lock. Every change wakes those who ``wait``."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._changed = threading.Condition()

    @property
    def tickets(self) -> int:
        """The number of tickets of a partition."""
        return self._gate.tickets

    @property
    def published(self) -> int | None:
        """The lowest version that all live engines have acknowledged; None before the first."""
        with self._changed:
            return self._gate.published

    def join(self, engine: str) -> None:
        """Let ``engine`` take part; it is admitted to nothing until it acknowledges a version."""
        with self._change():
            self._gate.join(engine)

    def acknowledge(self, engine: str, version: int) -> None:
        """Note that ``engine`` generates with ``version`` now; whoever waits for it is woken."""
        with self._change():
            self._gate.acknowledge(engine, version)

    def leave(self, engine: str, generated: Collection[Ticket] = ()) -> list[Ticket]:
        """Take out an engine that is gone; others get its tickets, but for those already ``generated``."""
        with self._change():
            return self._gate.leave(engine, generated)

    def pause(self, engine: str, why: str) -> None:
        """Admit ``engine`` to nothing until it resumes; ``why`` is told to who waits meanwhile."""
        with self._change():
            self._gate.pause(engine, why)

    def resume(self, engine: str) -> None:
        """End the pause of ``engine``; whoever waits for admission is woken."""
        with self._change():
            self._gate.resume(engine)

    def admit(self, engine: str, now: float) -> Ticket | Closed:
        """The next ticket for ``engine``, or why there is none now. Returns at once."""
        with self._changed:
            return self._gate.admit(engine, now)

    def closed(self, engine: str) -> Closed | None:
        """Why ``engine`` would get no ticket now; None if it would."""
        with self._changed:
            return self._gate.closed(engine)

    def done(self, ticket: Ticket) -> None:
        """The group of the ticket is in the store: it no longer counts as being made."""
        with self._change():
            self._gate.done(ticket)

    def redraw(self, ticket: Ticket) -> Ticket:
        """A dropped group's place opens again: the next attempt at the ticket, for another prompt."""
        with self._change():
            return self._gate.redraw(ticket)

    def give_back(self, ticket: Ticket) -> None:
        """Put back a ticket that was not filled; the same attempt will be given again."""
        with self._change():
            self._gate.give_back(ticket)

    def holdings(self) -> list[Holding]:
        """All tickets being filled, the longest first."""
        with self._changed:
            return self._gate.holdings()

    def wait(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Sleep until something changes (or until ``until`` holds), at most ``seconds``; whether it did."""
        with self._changed:
            return self._changed.wait(seconds) if until is None else self._changed.wait_for(until, seconds)

    def wake(self) -> None:
        """Wake those who wait, e.g. because the run ends."""
        with self._change():
            pass

    def _change(self) -> AbstractContextManager[None]:
        return _Change(self._changed)


class _Change(AbstractContextManager[None]):
    """Hold the lock, then wake everyone."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed

    def __enter__(self) -> None:
        self._changed.acquire()

    def __exit__(self, *_: object) -> None:
        self._changed.notify_all()
        self._changed.release()
