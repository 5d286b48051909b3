"""Which groups make up a partition for which more are begun than it needs: the first that are done. Pure.

The places 0 to P - 1 of a partition are its own, and each further place is a *spare* one. A group of an own place fills
that place when it is done. One of a spare place is held until as many are held as own places are open; then they fill
those, in the order of the places, and whatever else of the partition is still made is cancelled. So the P groups that
are done first are taken, a group that was dropped and is drawn anew is one more open place until then, and from then on
a dropped one is drawn anew as without spares.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Generic, TypeVar

from tandem.base.errors import ContractError
from tandem.dataflow.tickets import Ticket

T = TypeVar("T")


@dataclass(frozen=True)
class Arrival(Generic[T]):
    """What a finished group comes to: ``placed`` are tickets to be filled now, each with the group that fills it, and
    ``cancelled`` the tickets whose groups nobody wants any more. ``late``: it was one of these itself.
    """

    placed: tuple[tuple[Ticket, T], ...] = ()
    cancelled: tuple[Ticket, ...] = ()
    late: bool = False


class Spares(Generic[T]):
    """The partitions of ``tickets`` groups for each of which ``spare`` more are begun; for any threads.

    Whoever begins a group asks ``wants`` before; whoever has finished one tells ``arrived``, and whoever drops one that
    was placed ``reopened``, before its ticket is drawn anew. ``T`` is a finished group.
    """

    def __init__(self, tickets: int, spare: int) -> None:
        if tickets < 1 or spare < 1:
            raise ContractError(f"spares: tickets={tickets} and spare={spare} must be positive")
        self.tickets, self.spare = tickets, spare
        self._open: dict[int, dict[int, Ticket]] = {}  # partition -> own place -> its ticket, until it is filled
        self._held: dict[int, list[tuple[Ticket, T]]] = {}
        self._cut: set[int] = set()  # partitions that have all their groups
        self._cancelled: set[Ticket] = set()
        self._lock = threading.Lock()

    def is_spare(self, ticket: Ticket) -> bool:
        """Return whether the ticket is of no place that the partition itself has."""
        return ticket.place >= self.tickets

    def wants(self, ticket: Ticket) -> bool:
        """Return whether the group of the ticket may still become one of its partition."""
        with self._lock:
            return self._wants(ticket)

    def arrived(self, ticket: Ticket, group: T) -> Arrival[T]:
        """Tell what becomes of a group that is done."""
        with self._lock:
            if not self._wants(ticket):
                self._cancelled.discard(ticket)
                return Arrival(late=True)
            if ticket.partition in self._cut:  # of a ticket that was drawn anew
                return Arrival(((ticket, group),))
            return self._arrived(ticket, group)

    def forget(self, ticket: Ticket) -> None:
        """Note that a group which was cancelled is made no more."""
        with self._lock:
            self._cancelled.discard(ticket)

    def reopened(self, ticket: Ticket) -> None:
        """Note that the group under ``ticket`` was dropped, whose place is to be filled again by the next attempt."""
        with self._lock:
            if ticket.partition not in self._cut:
                again = Ticket(ticket.partition, ticket.place, ticket.attempt + 1)
                self._places(ticket.partition)[ticket.place] = again

    def _wants(self, ticket: Ticket) -> bool:
        too_late = self.is_spare(ticket) and ticket.partition in self._cut
        return not too_late and ticket not in self._cancelled

    def _places(self, partition: int) -> dict[int, Ticket]:
        fresh = {place: Ticket(partition, place) for place in range(self.tickets)}
        return self._open.setdefault(partition, fresh)

    def _arrived(self, ticket: Ticket, group: T) -> Arrival[T]:
        partition = ticket.partition
        still_open, held = self._places(partition), self._held.setdefault(partition, [])
        placed = []
        if not self.is_spare(ticket):
            still_open.pop(ticket.place, None)
            placed.append((ticket, group))
        elif all(other != ticket for other, _ in held):  # an engine given up may deliver what another has made anew
            held.append((ticket, group))
        if len(held) < len(still_open):
            return Arrival(tuple(placed))
        displaced = sorted(still_open.values())
        placed += zip(displaced, (spare for _, spare in held), strict=True)
        used = {spare for spare, _ in held}
        spares = (Ticket(partition, self.tickets + number) for number in range(self.spare))
        cancelled = (*displaced, *(spare for spare in spares if spare not in used))
        self._cut.add(partition)
        self._cancelled.update(displaced)
        del self._open[partition], self._held[partition]
        return Arrival(tuple(placed), cancelled)
