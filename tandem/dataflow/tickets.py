"""What names a group while it is made, and what a consumer holds while it works."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.dataflow.partition import Order


class Ticket(NamedTuple):
    """The right to fill one ``place`` (0 to P - 1) of a ``partition``.

    A dropped group's place is refilled under ``attempt + 1``: the randomness of a draw is keyed by all three numbers,
    and what still arrives for an earlier attempt is known to be late.
    """

    partition: int
    place: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"ticket {self.place} of partition {self.partition} (attempt {self.attempt})"


@dataclass(frozen=True)
class Request:
    """What a consumer of ``task`` asks for: ``count`` whole groups of one partition that have all ``columns``.

    ``arrival`` is what is ready; ``canonical`` is ticket order, and waits for the next ticket. ``partition`` None means
    the earliest that can serve. ``consumer`` is its name in messages.
    """

    task: str
    columns: Sequence[str]
    count: int
    partition: int | None = None
    order: Order = "arrival"
    consumer: str = ""

    def __str__(self) -> str:
        return f"{self.count} groups with {sorted(self.columns)} for task {self.task!r}"


@dataclass(frozen=True)
class Lease:
    """Whole groups of one partition lent to a consumer of ``task`` until ``expires`` (clock of whoever lent them).

    Acknowledged, they count as consumed by the task; given back or expired, they are lent again.
    """

    id: int
    task: str
    consumer: str
    tickets: tuple[Ticket, ...]
    expires: float

    @property
    def partition(self) -> int:
        """The partition of all its tickets."""
        return self.tickets[0].partition

    def __len__(self) -> int:
        return len(self.tickets)


class Leases:
    """The leases held, with the next to expire always at hand."""

    def __init__(self) -> None:
        self.last_id = 0
        self._held: dict[int, Lease] = {}
        self._expiries: list[tuple[float, int]] = []  # heap; entries of ended leases are skipped when met

    def new(self, task: str, consumer: str, tickets: tuple[Ticket, ...], expires: float) -> Lease:
        """Lend the tickets to ``consumer`` until ``expires``, under a new number."""
        self.last_id += 1
        lease = Lease(self.last_id, task, consumer, tickets, expires)
        self._held[lease.id] = lease
        heapq.heappush(self._expiries, (expires, lease.id))
        return lease

    def end(self, lease: Lease) -> bool:
        """End a lease; says whether it was still held."""
        return self._held.pop(lease.id, None) is not None

    def end_all_of(self, partition: int) -> None:
        """End every lease of a partition that is over."""
        self._held = {id_: lease for id_, lease in self._held.items() if lease.partition != partition}

    def due(self, now: float) -> list[Lease]:
        """Return the leases still held whose time is up."""
        due = []
        while self._expiries and self._expiries[0][0] <= now:
            id_ = heapq.heappop(self._expiries)[1]
            if id_ in self._held:
                due.append(self._held[id_])
        return due

    def next_expiry(self) -> float | None:
        """Return when the next lease ends by itself; None without leases."""
        while self._expiries and self._expiries[0][1] not in self._held:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def consumers(self, ids: set[int]) -> tuple[str, ...]:
        """Return the names of those who hold these leases, sorted."""
        return tuple(sorted({self._held[id_].consumer for id_ in ids}))
