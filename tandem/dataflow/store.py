"""The data plane: where the groups of a run are put, taken, completed column by column, and dropped.

``DataPlane`` is the protocol; ``LocalStore`` keeps everything in this process, for any number of threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from tandem.base.deadline import Deadline
from tandem.columns.proto import DataProto
from tandem.dataflow.diagnosis import plane_status, what_fills, who_blocks
from tandem.dataflow.group_storage import Columns, GroupStorage, as_batch, as_columns, join, without_identity
from tandem.dataflow.ledger import TRAINED, Ledger
from tandem.dataflow.partition import Order
from tandem.dataflow.progress import Outcome, PlaneStatus
from tandem.dataflow.tickets import Lease, Ticket


@runtime_checkable
class Answering(Protocol):
    """A data plane whose parts are other processes."""

    def silent(self, seconds: float) -> list[str]:
        """Those that give no sign of life within so many seconds, in words."""


class DataPlane(Protocol):
    """What producers and consumers see of a store. Every wait ends in time, with a ``DeadlineError`` that names the
    blocking party; a partition that can't be filled ends it at once with a ``StarvationError``."""

    def assign(self, ticket: Ticket, engine: str) -> None:
        """Note that ``engine`` has begun to fill the ticket: a stall will be blamed on it."""

    def put(
        self, tickets: Sequence[Ticket], data: DataProto, *, timeout: float, sample: int | None = None
    ) -> list[Outcome]:
        """Add columns to whole groups, ``data`` being n rows per ticket in the order of ``tickets``; or one row per
        ticket, its sample ``sample``. The first put of a group brings the column that produces it. Waits for room.

        Gives one outcome per ticket. ``DUPLICATE`` and ``STALE`` data is not kept (and counted); ``DROPPED`` means
        that the group ended because one of its samples had failed. Tensors are kept by reference: don't change them.
        """

    def take(
        self,
        task: str,
        columns: Collection[str],
        count: int,
        *,
        timeout: float,
        partition: int | None = None,
        order: Order = "arrival",
        consumer: str = "",
    ) -> Lease | None:
        """Wait for ``count`` whole groups of one partition that have ``columns`` and that ``task`` hasn't had, or all
        that are left; None once the task has consumed the partition. See ``Ledger.take``."""

    def acknowledge(self, lease: Lease) -> None:
        """The task has consumed the lease's groups."""

    def give_back(self, lease: Lease) -> None:
        """The task has not consumed them; lend them again."""

    def get(self, tickets: Sequence[Ticket], columns: Collection[str]) -> DataProto:
        """``columns`` of the groups in the order of ``tickets``, n rows each, with ``group_ids`` and ``sample_index``.
        Read only: tensors may be shared with the store."""

    def seal(self, partition: int, *, timeout: float) -> None:
        """Wait until every ticket of the partition is filled, and make its groups final."""

    def status(self) -> PlaneStatus:
        """Everything at this moment."""

    def drop(
        self, target: Ticket | int, reason: str = TRAINED, *, sample: int | None = None, retry: bool = False
    ) -> Outcome:
        """Free a partition (an int: after training, or for another ``reason``), a group, or note that one ``sample`` of
        a group failed. ``DROPPED``: the ticket is open again. See ``Ledger.drop``."""


class LocalStore(DataPlane):
    """A ``DataPlane`` in this process. A put copies nothing; a get joins each column once, and not even that where the
    groups lie one after the other in one put."""

    def __init__(self, ledger: Ledger, lease_seconds: float) -> None:
        self._ledger = ledger
        self._lease_seconds = lease_seconds
        self._shelf = GroupStorage(ledger.samples, ledger.produced_by)
        self._changed = threading.Condition()

    def assign(self, ticket: Ticket, engine: str) -> None:
        """See ``DataPlane``."""
        with self._changed:
            self._ledger.assign(ticket, engine, time.monotonic())

    def put(
        self, tickets: Sequence[Ticket], data: DataProto, *, timeout: float, sample: int | None = None
    ) -> list[Outcome]:
        """See ``DataPlane``."""
        deadline = Deadline(timeout)
        slabs = as_columns(tickets, data, self._ledger.samples, sample)
        rows = self._ledger.samples if sample is None else 1
        outcomes = []
        with self._changed:
            try:
                for i, ticket in enumerate(tickets):
                    outcomes.append(self._put_one(ticket, slabs, i * rows, sample, deadline))
            finally:
                self._changed.notify_all()
        return outcomes

    def take(
        self,
        task: str,
        columns: Collection[str],
        count: int,
        *,
        timeout: float,
        partition: int | None = None,
        order: Order = "arrival",
        consumer: str = "",
    ) -> Lease | None:
        """See ``DataPlane``."""
        deadline = Deadline(timeout)
        wanted = without_identity(columns)
        with self._changed:
            while partition is None or not self._ledger.exhausted(task, partition):
                lease = self._ledger.take(
                    task,
                    wanted,
                    count,
                    now=time.monotonic(),
                    seconds=self._lease_seconds,
                    partition=partition,
                    order=order,
                    consumer=consumer,
                )
                if lease is not None:
                    return lease
                awaited = f"{count} groups with {sorted(wanted)} for task {task!r}"
                self._wait(deadline, awaited, partial(who_blocks, self._ledger, partition, task))
        return None

    def acknowledge(self, lease: Lease) -> None:
        """See ``DataPlane``."""
        with self._changed:
            self._ledger.acknowledge(lease, time.monotonic())
            self._changed.notify_all()

    def give_back(self, lease: Lease) -> None:
        """See ``DataPlane``."""
        with self._changed:
            self._ledger.give_back(lease)
            self._changed.notify_all()

    def get(self, tickets: Sequence[Ticket], columns: Collection[str]) -> DataProto:
        """See ``DataPlane``."""
        with self._changed:
            pieces = self._shelf.pieces(tickets, without_identity(columns))
        return as_batch(tickets, self._ledger.samples, {name: join(cut) for name, cut in pieces.items()})

    def seal(self, partition: int, *, timeout: float) -> None:
        """See ``DataPlane``."""
        deadline = Deadline(timeout)
        with self._changed:
            while not self._ledger.seal(partition, time.monotonic()):
                blocker = partial(who_blocks, self._ledger, partition, None)
                self._wait(deadline, f"the seal of partition {partition}", blocker)

    def status(self) -> PlaneStatus:
        """See ``DataPlane``."""
        with self._changed:
            return plane_status(self._ledger, time.monotonic())

    def drop(
        self, target: Ticket | int, reason: str = TRAINED, *, sample: int | None = None, retry: bool = False
    ) -> Outcome:
        """See ``DataPlane``."""
        with self._changed:
            try:
                if isinstance(target, int):
                    self._ledger.retire(target, reason)
                    self._shelf.free_partition(target)
                    return Outcome.DROPPED
                try:
                    return self._ledger.drop(target, reason, time.monotonic(), sample, retry)
                finally:
                    self._free_unless_held(target)
            finally:
                self._changed.notify_all()

    # --- inside; the lock is held ------------------------------------------------------------------------------------

    def _put_one(self, ticket: Ticket, slabs: Columns, row: int, sample: int | None, deadline: Deadline) -> Outcome:
        while True:
            try:
                outcome = self._ledger.put(ticket, slabs.keys(), time.monotonic(), sample)
            finally:
                self._free_unless_held(ticket)
            if outcome is not Outcome.FULL:
                break
            self._changed.notify_all()  # what was put so far can be taken meanwhile
            self._wait(deadline, f"room for {ticket}", partial(what_fills, self._ledger))
        if outcome is Outcome.STORED:
            self._shelf.add(ticket, slabs, row, sample)
        return outcome

    def _free_unless_held(self, ticket: Ticket) -> None:
        """Let go of a group that the ledger has dropped."""
        if not self._ledger.holds(ticket):
            self._shelf.free(ticket)

    def _wait(self, deadline: Deadline, awaited: str, blocker: Callable[[float], str]) -> None:
        """Sleep until something changes, a lease expires, or the time is over, which raises ``DeadlineError``."""
        if deadline.left == 0.0:
            deadline.check(awaited, blocker(time.monotonic()))
        expiry = self._ledger.next_expiry()
        until = deadline.left if expiry is None else min(deadline.left, max(0.0, expiry - time.monotonic()))
        self._changed.wait(until)
