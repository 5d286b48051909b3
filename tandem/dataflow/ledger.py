"""The ledger of the data plane: which groups exist, what is ready, who has read what, and where every sample went.

Pure: no tensors, no threads, no clock (``now`` is an argument, in seconds of any clock that doesn't go back). Stores
hold the data and do what the ledger says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from tandem.base.errors import ContractError, StarvationError
from tandem.dataflow.partition import Group, Partition
from tandem.dataflow.progress import Accounts, OpenTicket, Outcome, PartitionStatus, TaskProgress
from tandem.dataflow.tickets import Lease, Leases, Request, Ticket

TRAINED = "trained"


class Ledger:
    """Partitions of ``tickets`` groups of ``samples`` samples each.

    - A group is *produced*, all its samples at once, when the column ``produced_by`` is first put for it, and *filled*
      once it has all of ``settled_by``.
    - A dropped group's ticket is open again under the next attempt; ``max_draws`` draws of one ticket in a row that are
      all dropped raise ``StarvationError``.
    - ``capacity`` bounds the groups held. Room for the unfilled tickets of *earlier* partitions is kept free, so a
      producer that runs ahead can't stop the partition that is being waited for. Nothing is ever evicted.
    - ``first`` is the first partition that isn't over (after a resume).
    """

    def __init__(
        self,
        tickets: int,
        samples: int,
        *,
        capacity: int,
        max_draws: int,
        produced_by: str = "responses",
        settled_by: Collection[str] = ("responses",),
        first: int = 0,
    ) -> None:
        if tickets < 1 or samples < 1 or max_draws < 1:
            raise ContractError(f"ledger: tickets={tickets}, samples={samples}, max_draws={max_draws} must be positive")
        if capacity < tickets:
            raise ContractError(f"ledger: capacity {capacity} groups can't hold one partition of {tickets}; raise it")
        self.tickets = tickets
        self.samples = samples
        self.capacity = capacity
        self.max_draws = max_draws
        self.produced_by = produced_by
        self.settled_by = frozenset(settled_by) | {produced_by}
        self._partitions: dict[int, Partition] = {}
        self._first = first  # all partitions below are over
        self._over: set[int] = set()  # and these above it
        self._columns_of: dict[str, frozenset[str]] = {}  # by task
        self._leases = Leases()
        self._produced = 0
        self._trained = 0
        self._dropped: Counter[str] = Counter()
        self._starved: dict[int, str] = {}

    # --- producers ---------------------------------------------------------------------------------------------------

    def assign(self, ticket: Ticket, engine: str, now: float) -> None:
        """Note that ``engine`` has begun to fill the ticket, so that a stall can be blamed on someone."""
        group = self._current(ticket, now)
        if group is not None:
            group.engine, group.since = engine, now

    def put(self, ticket: Ticket, columns: Collection[str], now: float) -> Outcome:
        """Store ``columns`` of a group. What is there already stays.

        Raises ``ContractError`` for a column of a group that isn't produced yet.
        """
        group = self._current(ticket, now)
        produces = self.produced_by in columns
        if group is None:
            return self._lose(Outcome.STALE, "stale") if produces else Outcome.STALE
        if produces:
            if group.columns:
                return self._lose(Outcome.DUPLICATE, "duplicate")
            if not self._has_room(ticket.partition):
                return Outcome.FULL
            self._produced += self.samples
            group.since = now  # from here on it waits for others than its engine
        elif not group.columns:
            raise ContractError(
                f"{ticket}: {sorted(columns)} put before {self.produced_by!r}; the first put makes the group"
            )
        elif group.columns.issuperset(columns):
            return Outcome.DUPLICATE
        self._partitions[ticket.partition].write(ticket.place, columns)
        return Outcome.STORED

    def drop(self, ticket: Ticket, reason: str, now: float) -> Outcome:
        """Give up a group: its ticket is open again, for the next attempt.

        Raises ``StarvationError``, after noting the drop, when the ticket has been drawn ``max_draws`` times in vain;
        ``ContractError`` on a sealed partition.
        """
        group = self._current(ticket, now)
        if group is None:
            return Outcome.STALE
        home = self._partitions[ticket.partition]
        if home.sealed:
            raise ContractError(f"{ticket}: the partition is sealed, its groups are final; drop before sealing")
        if not group.columns:
            self._produced += self.samples
        self._dropped[reason] += self.samples
        home.drops[reason] += 1
        home.reopen(ticket.place, ticket.attempt + 1, now)
        if ticket.attempt + 1 >= self.max_draws:
            reasons = ", ".join(f"{count} x {name}" for name, count in home.drops.items())
            self._starved[ticket.partition] = (
                f"partition {ticket.partition} can't be filled: ticket {ticket.place} was drawn {self.max_draws} times "
                f"in a row and every group was dropped, the last one for {reason!r} (in this partition: {reasons}). Is "
                "the reward constant, or a filter too strict? Change it, or allow more draws"
            )
            raise StarvationError(self._starved[ticket.partition])
        return Outcome.DROPPED

    def seal(self, number: int, now: float) -> bool:
        """Close the partition if every ticket is filled: its groups are final from here on. Says whether it is sealed.

        Raises ``StarvationError`` if it can't be filled.
        """
        partition = self._open(number, now)
        self._check_starved(number)
        partition.sealed = partition.sealed or partition.filled == self.tickets
        return partition.sealed

    def retire(self, number: int, reason: str = TRAINED) -> None:
        """Drop the whole partition: ``"trained"`` counts its samples as trained and needs a seal, any other reason as
        dropped. Leases on it end."""
        if self._is_over(number):
            raise ContractError(f"partition {number} is over already")
        partition = self._partitions.get(number)
        if reason == TRAINED:
            if partition is None or not partition.sealed:
                raise ContractError(f"partition {number} can't have been trained: it isn't sealed")
            self._trained += self.tickets * self.samples
        elif partition is not None:
            self._dropped[reason] += partition.stored * self.samples
        self._partitions.pop(number, None)
        self._starved.pop(number, None)
        self._leases.end_all_of(number)
        self._over.add(number)
        while self._first in self._over:
            self._over.remove(self._first)
            self._first += 1

    # --- consumers ---------------------------------------------------------------------------------------------------

    def take(self, request: Request, *, now: float, seconds: float) -> Lease | None:
        """Lend what is asked for, of groups that the task has not had, for so many ``seconds``.

        Fewer than ``count`` are lent only where fewer are left; None while there is nothing to lend. A task always
        reads the same columns. Raises ``StarvationError`` if the partition can't be filled.
        """
        task, columns, partition = request.task, frozenset(request.columns), request.partition
        if request.count < 1:
            raise ContractError(f"take: count must be at least 1 group, got {request.count}")
        wanted = self._columns_of.setdefault(task, columns)
        if wanted != columns:
            raise ContractError(
                f"task {task!r} reads {sorted(wanted)}, now {sorted(columns)}; use another task name for other columns"
            )
        self.expire(now)
        for number in [partition] if partition is not None else sorted(self._partitions):
            if self._is_over(number):
                raise ContractError(f"task {task!r} takes from partition {number}, which is over")
            self._check_starved(number)
            home = self._open(number, now)
            reader = home.reader(task, wanted)
            chosen = reader.choose(request.count, self.tickets, request.order)
            if chosen is not None:
                tickets = tuple(Ticket(number, place, home.groups[place].attempt) for place in chosen)
                lease = self._leases.new(task, request.consumer, tickets, now + seconds)
                reader.claim(chosen, lease.id)
                return lease
        return None

    def acknowledge(self, lease: Lease, now: float) -> None:
        """Note that the task has consumed the lease's groups for good. Raises ``ContractError`` if the lease is
        over.
        """
        self.expire(now)
        if not self._leases.end(lease):
            raise ContractError(
                f"lease {lease.id} of task {lease.task!r} on partition {lease.partition} is over: it was given back, "
                "acknowledged, or expired, and others may have its groups. Take again, or lend for longer"
            )
        reader = self._partitions[lease.partition].readers[lease.task]
        for ticket in lease.tickets:
            reader.acknowledge(ticket.place, lease.id)

    def give_back(self, lease: Lease) -> None:
        """Note that the task has not consumed the lease's groups; they are lent again. Harmless if the lease is
        over.
        """
        if self._leases.end(lease):
            reader = self._partitions[lease.partition].readers[lease.task]
            reader.give_back([ticket.place for ticket in lease.tickets], lease.id)

    def expire(self, now: float) -> None:
        """Give back what dead consumers hold."""
        for lease in self._leases.due(now):
            self.give_back(lease)

    def next_expiry(self) -> float | None:
        """Return when the next lease ends by itself; None without leases."""
        return self._leases.next_expiry()

    def exhausted(self, task: str, number: int) -> bool:
        """Return whether ``task`` has acknowledged every group of the partition (or the partition is over)."""
        if self._is_over(number):
            return True
        home = self._partitions.get(number)
        return home is not None and task in home.readers and home.readers[task].acked == self.tickets

    # --- looking -----------------------------------------------------------------------------------------------------

    def accounts(self) -> Accounts:
        """Return where all samples are now; counts the queued groups one by one, so that ``check`` means something."""
        queued = sum(bool(group.columns) for home in self._partitions.values() for group in home.groups) * self.samples
        return Accounts(self._produced, self._trained, queued, dict(self._dropped))

    @property
    def held(self) -> int:
        """Groups that hold data, of ``capacity``."""
        return sum(partition.stored for partition in self._partitions.values())

    def live_partitions(self) -> list[int]:
        """Return the partitions that have begun and aren't over."""
        return sorted(self._partitions)

    def holds(self, ticket: Ticket) -> bool:
        """Return whether there is data under this very attempt."""
        home = self._partitions.get(ticket.partition)
        if home is None or not 0 <= ticket.place < self.tickets:
            return False
        group = home.groups[ticket.place]
        return group.attempt == ticket.attempt and bool(group.columns)

    def open_tickets(self, number: int, now: float) -> list[Ticket]:
        """Return the tickets of a partition without a whole group, each with the attempt that is due."""
        groups = self._open(number, now).groups
        return [Ticket(number, index, group.attempt) for index, group in enumerate(groups) if not group.filled]

    def status(self, number: int, now: float) -> PartitionStatus:
        """Return the state of one partition, for the diagnosis of a stall."""
        home = self._open(number, now)
        unfilled = tuple(
            self._open_ticket(Ticket(number, i, group.attempt), home, now)
            for i, group in enumerate(home.groups)
            if not group.filled
        )
        tasks = {}
        for task, reader in home.readers.items():
            holders = self._leases.consumers(reader.leases())
            leased = len(reader.claimed) - reader.acked
            lacking = home.lacking(sorted(reader.columns))
            tasks[task] = TaskProgress(len(reader.eligible), leased, reader.acked, holders, lacking)
        return PartitionStatus(number, self.tickets, home.filled, home.sealed, unfilled, tasks, dict(home.drops))

    # --- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything but leases, as plain JSON data: after a restart their holders are gone."""
        return {
            "shape": [self.tickets, self.samples],
            "partitions": {str(number): home.state_dict() for number, home in self._partitions.items()},
            "first": self._first,
            "over": sorted(self._over),
            "columns_of": {task: sorted(columns) for task, columns in self._columns_of.items()},
            "last_lease": self._leases.last_id,
            "produced": self._produced,
            "trained": self._trained,
            "dropped": dict(self._dropped),
        }

    def load_state_dict(self, state: dict[str, Any], now: float) -> None:
        """Go on where ``state`` was taken. Groups that aren't filled yet count as dropped (``interrupted``).

        The same draw of their ticket is due again. Raises ``ContractError`` for a state of another shape, or if this
        ledger was used.
        """
        if state["shape"] != [self.tickets, self.samples] or self._produced or self._partitions:
            raise ContractError(
                f"ledger: a state of {state['shape']} (tickets, samples) needs an unused ledger of that shape; this "
                f"one is of {[self.tickets, self.samples]} and has produced {self._produced} samples"
            )
        self._first, self._over = state["first"], set(state["over"])
        self._columns_of = {task: frozenset(columns) for task, columns in state["columns_of"].items()}
        self._leases.last_id = state["last_lease"]
        self._produced, self._trained, self._dropped = state["produced"], state["trained"], Counter(state["dropped"])
        for number, saved in state["partitions"].items():
            in_part = self._open(int(number), now).load_state_dict(saved, self._columns_of)
            if in_part:
                self._dropped["interrupted"] += in_part * self.samples

    # --- inside ------------------------------------------------------------------------------------------------------

    def _open_ticket(self, ticket: Ticket, home: Partition, now: float) -> OpenTicket:
        group = home.groups[ticket.place]
        lacking = sorted(self.settled_by - group.columns) if group.columns else ()
        return OpenTicket(ticket, group.engine, now - group.since, tuple(lacking))

    def _is_over(self, number: int) -> bool:
        return number < self._first or number in self._over

    def _open(self, number: int, now: float) -> Partition:
        """Return the partition; begun if this is the first word of it."""
        if number not in self._partitions:
            if self._is_over(number):
                raise ContractError(f"partition {number} is over")
            self._partitions[number] = Partition(self.tickets, self.settled_by, now)
        return self._partitions[number]

    def _current(self, ticket: Ticket, now: float) -> Group | None:
        """Return the group under the ticket; None if its attempt has been given up or its partition is over."""
        if not 0 <= ticket.place < self.tickets:
            raise ContractError(f"{ticket}: a partition has tickets 0 to {self.tickets - 1}")
        if self._is_over(ticket.partition):
            return None
        group = self._open(ticket.partition, now).groups[ticket.place]
        if ticket.attempt > group.attempt:
            raise ContractError(f"{ticket}: attempt {group.attempt} is due; later ones come after a drop")
        return group if ticket.attempt == group.attempt else None

    def _has_room(self, number: int) -> bool:
        """Return whether one more group of this partition leaves room for all unfilled tickets of earlier ones."""
        reserved = 0
        for earlier in range(self._first, number):
            if earlier in self._partitions:
                reserved += self.tickets - self._partitions[earlier].stored
            elif earlier not in self._over:
                reserved += self.tickets
        return self.held + reserved < self.capacity

    def _lose(self, outcome: Outcome, reason: str) -> Outcome:
        self._produced += self.samples
        self._dropped[reason] += self.samples
        return outcome

    def _check_starved(self, number: int) -> None:
        if number in self._starved:
            raise StarvationError(self._starved[number])
