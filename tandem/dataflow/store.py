"""The data plane: where the groups of a run are put, taken, completed column by column, and dropped.

``DataPlane`` is the protocol; ``LocalStore`` keeps everything in this process, for any number of threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, runtime_checkable

from tandem.base.deadline import Deadline
from tandem.columns.proto import DataProto
from tandem.dataflow.diagnosis import plane_status, what_fills, who_blocks
from tandem.dataflow.group_storage import Columns, GroupStorage, as_batch, as_columns, join, without_identity
from tandem.dataflow.ledger import TRAINED, Ledger
from tandem.dataflow.progress import Outcome, PlaneStatus
from tandem.dataflow.tickets import Lease, Request, Ticket


@runtime_checkable
class Monitored(Protocol):
    """A data plane whose parts are other processes. ``RayStore`` is one."""

    def silent(self, seconds: float) -> list[str]:
        """Return the parts that give no sign of life within so many seconds, in words."""


class DataPlane(Protocol):
    """What producers and consumers see of a store. Every wait ends in time, with a ``DeadlineError`` that names the
    blocking party; a partition that can't be filled ends it at once with a ``StarvationError``. ``LocalStore`` keeps
    all in this process, ``RayStore`` in actors of Ray. What a stage does with it::

        while (lease := plane.take(request, timeout=60.0)) is not None:
            batch = plane.get(lease.tickets, columns)
            plane.put(lease.tickets, compute(batch), timeout=60.0)
            plane.acknowledge(lease)
    """

    def assign(self, ticket: Ticket, engine: str) -> None:
        """Note that ``engine`` has begun to fill the ticket: a stall will be blamed on it."""

    def put(self, tickets: Sequence[Ticket], data: DataProto, *, timeout: float) -> list[Outcome]:
        """Add columns to groups, ``data`` being n rows per ticket in the order of ``tickets``. The first put of a group
        brings the column that produces it. Waits for room.

        Gives one outcome per ticket. ``DUPLICATE`` and ``STALE`` data is not kept (and counted). Tensors are kept by
        reference: don't change them.
        """

    def take(self, request: Request, *, timeout: float) -> Lease | None:
        """Wait for what is asked for, of groups that the task hasn't had, or for all that are left; None once the task
        has consumed the partition. See ``Ledger.take``."""

    def acknowledge(self, lease: Lease) -> None:
        """Note that the task has consumed the lease's groups."""

    def get(self, tickets: Sequence[Ticket], columns: Collection[str]) -> DataProto:
        """Return ``columns`` of the groups in the order of ``tickets``, n rows each, with ``group_ids`` and
        ``sample_index``. Read only: tensors may be shared with the store.
        """

    def seal(self, partition: int, *, timeout: float) -> None:
        """Wait until every ticket of the partition is filled, and make its groups final."""

    def status(self) -> PlaneStatus:
        """Return the counts of every partition and task at this moment."""

    def drop(self, target: Ticket | int, reason: str = TRAINED) -> Outcome:
        """Free a partition (an int: after training, or for another ``reason``) or a group, whose ticket is open again.
        See ``Ledger.drop``."""


class LocalStore(DataPlane):
    """A ``DataPlane`` in this process. A put copies nothing; a get joins each column once, and not even that where the
    groups lie one after the other in one put."""

    def __init__(self, ledger: Ledger, lease_seconds: float) -> None:
        self._ledger = ledger
        self._lease_seconds = lease_seconds
        self._storage = GroupStorage(ledger.samples)
        self._changed = threading.Condition()

    def assign(self, ticket: Ticket, engine: str) -> None:
        """Note in the ledger that ``engine`` has begun to fill the ticket."""
        with self._changed:
            self._ledger.assign(ticket, engine, time.monotonic())

    def put(self, tickets: Sequence[Ticket], data: DataProto, *, timeout: float) -> list[Outcome]:
        """Keep the columns by reference, one group after the other, each as soon as there is room for it."""
        deadline = Deadline(timeout)
        columns = as_columns(tickets, data, self._ledger.samples)
        outcomes = []
        with self._changed:
            try:
                for i, ticket in enumerate(tickets):
                    outcomes.append(self._put_one(ticket, columns, i * self._ledger.samples, deadline))
            finally:
                self._changed.notify_all()
        return outcomes

    def take(self, request: Request, *, timeout: float) -> Lease | None:
        """Wait on the ledger for a lease; None once the task has consumed the partition."""
        deadline = Deadline(timeout)
        request = replace(request, columns=without_identity(request.columns))
        task, partition = request.task, request.partition
        with self._changed:
            while partition is None or not self._ledger.exhausted(task, partition):
                lease = self._ledger.take(request, now=time.monotonic(), seconds=self._lease_seconds)
                if lease is not None:
                    return lease
                self._wait(deadline, str(request), partial(who_blocks, self._ledger, partition, task))
        return None

    def acknowledge(self, lease: Lease) -> None:
        """Count the groups of the lease as consumed, and wake who waits for room."""
        with self._changed:
            self._ledger.acknowledge(lease, time.monotonic())
            self._changed.notify_all()

    def get(self, tickets: Sequence[Ticket], columns: Collection[str]) -> DataProto:
        """Return the columns in the order of ``tickets``, joined once, and shared where they lie together. Read
        only.
        """
        with self._changed:
            pieces = self._storage.pieces(tickets, without_identity(columns))
        return as_batch(tickets, self._ledger.samples, {name: join(cut) for name, cut in pieces.items()})

    def seal(self, partition: int, *, timeout: float) -> None:
        """Wait until every ticket of the partition is filled, with the ledger's word for who blocks."""
        deadline = Deadline(timeout)
        with self._changed:
            while not self._ledger.seal(partition, time.monotonic()):
                blocker = partial(who_blocks, self._ledger, partition, None)
                self._wait(deadline, f"the seal of partition {partition}", blocker)

    def status(self) -> PlaneStatus:
        """Return the counts of every partition and task at this moment."""
        with self._changed:
            return plane_status(self._ledger, time.monotonic())

    def drop(self, target: Ticket | int, reason: str = TRAINED) -> Outcome:
        """Free a partition, or drop a group; tensors go once no lease holds them."""
        with self._changed:
            try:
                if isinstance(target, int):
                    self._ledger.retire(target, reason)
                    self._storage.free_partition(target)
                    return Outcome.DROPPED
                try:
                    return self._ledger.drop(target, reason, time.monotonic())
                finally:
                    self._free_unless_held(target)
            finally:
                self._changed.notify_all()

    # --- inside; the lock is held ------------------------------------------------------------------------------------

    def _put_one(self, ticket: Ticket, columns: Columns, row: int, deadline: Deadline) -> Outcome:
        while (outcome := self._ledger.put(ticket, columns.keys(), time.monotonic())) is Outcome.FULL:
            self._changed.notify_all()  # what was put so far can be taken meanwhile
            self._wait(deadline, f"room for {ticket}", partial(what_fills, self._ledger))
        if outcome is Outcome.STORED:
            self._storage.add(ticket, columns, row)
        return outcome

    def _free_unless_held(self, ticket: Ticket) -> None:
        """Let go of a group that the ledger has dropped."""
        if not self._ledger.holds(ticket):
            self._storage.free(ticket)

    def _wait(self, deadline: Deadline, awaited: str, blocker: Callable[[float], str]) -> None:
        """Sleep until something changes, a lease expires, or the time is over, which raises ``DeadlineError``."""
        if deadline.left == 0.0:
            deadline.check(awaited, blocker(time.monotonic()))
        expiry = self._ledger.next_expiry()
        until = deadline.left if expiry is None else min(deadline.left, max(0.0, expiry - time.monotonic()))
        self._changed.wait(until)
