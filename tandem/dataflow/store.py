"""The data plane: where the groups of a run are put, taken, completed column by column, and dropped.

``DataPlane`` is the protocol; ``LocalStore`` keeps everything in this process, for any number of threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from tandem.base.deadline import Deadline
from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.dataflow.ledger import TRAINED, Ledger
from tandem.dataflow.partition import Order
from tandem.dataflow.progress import Accounts, Outcome, PartitionStatus
from tandem.dataflow.tickets import Lease, Ticket

IDENTITY = ("group_ids", "sample_index")  # made by `get` from the tickets, so that they can't be wrong


@dataclass(frozen=True)
class PlaneStatus:
    """The whole data plane at one moment: ``held`` of ``capacity`` groups, every live partition, every sample."""

    held: int
    capacity: int
    partitions: dict[int, PartitionStatus]
    accounts: Accounts


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


Slab: TypeAlias = Tensor | Ragged | list[Any]
Cell: TypeAlias = tuple[Slab, int]  # a put's column and the row in it where a group, or one sample, begins
Cells: TypeAlias = list[Cell | None]  # one cell for the whole group, or one per sample


class LocalStore(DataPlane):
    """A ``DataPlane`` in this process. A put copies nothing; a get joins each column once, and not even that where the
    groups lie one after the other in one put."""

    def __init__(self, ledger: Ledger, lease_seconds: float) -> None:
        self._ledger = ledger
        self._lease_seconds = lease_seconds
        self._groups: dict[int, dict[int, dict[str, Cells]]] = {}  # partition -> place -> column
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
        rows = self._ledger.samples if sample is None else 1
        if len(data) != rows * len(tickets):
            raise ContractError(f"put: {len(tickets)} tickets of {rows} samples need as many rows, got {len(data)}")
        self._check_identity(tickets, data, sample)
        slabs: dict[str, Slab] = {**data.batch, **data.non_tensor_batch}
        slabs = {name: slab for name, slab in slabs.items() if name not in IDENTITY}
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
        wanted = [column for column in columns if column not in IDENTITY]
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
                self._wait(deadline, awaited, lambda: self._blocker(partition, task))
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
        names = [name for name in columns if name not in IDENTITY]
        with self._changed:
            groups = [self._held(ticket) for ticket in tickets]
            pieces = {name: self._pieces(name, tickets, groups) for name in names}
        joined = {name: _join(cut) for name, cut in pieces.items()}
        places, samples = _identity(tickets, self._ledger.samples, None)
        return DataProto(
            {
                **{name: column for name, column in joined.items() if not isinstance(column, list)},
                "group_ids": places,
                "sample_index": samples,
            },
            {name: column for name, column in joined.items() if isinstance(column, list)},
        )

    def seal(self, partition: int, *, timeout: float) -> None:
        """See ``DataPlane``."""
        deadline = Deadline(timeout)
        with self._changed:
            while not self._ledger.seal(partition, time.monotonic()):
                self._wait(deadline, f"the seal of partition {partition}", lambda: self._blocker(partition, None))

    def status(self) -> PlaneStatus:
        """See ``DataPlane``."""
        with self._changed:
            now, ledger = time.monotonic(), self._ledger
            ledger.expire(now)
            partitions = {number: ledger.status(number, now) for number in ledger.live_partitions()}
            return PlaneStatus(ledger.held, ledger.capacity, partitions, ledger.accounts())

    def drop(
        self, target: Ticket | int, reason: str = TRAINED, *, sample: int | None = None, retry: bool = False
    ) -> Outcome:
        """See ``DataPlane``."""
        with self._changed:
            try:
                if isinstance(target, int):
                    self._ledger.retire(target, reason)
                    self._groups.pop(target, None)
                    return Outcome.DROPPED
                try:
                    return self._ledger.drop(target, reason, time.monotonic(), sample, retry)
                finally:
                    self._free_unless_held(target)
            finally:
                self._changed.notify_all()

    # --- inside; the lock is held ------------------------------------------------------------------------------------

    def _put_one(
        self, ticket: Ticket, slabs: dict[str, Slab], row: int, sample: int | None, deadline: Deadline
    ) -> Outcome:
        while True:
            try:
                outcome = self._ledger.put(ticket, slabs.keys(), time.monotonic(), sample)
            finally:
                self._free_unless_held(ticket)
            if outcome is not Outcome.FULL:
                break
            self._changed.notify_all()  # what was put so far can be taken meanwhile
            self._wait(deadline, f"room for {ticket}", self._full)
        if outcome is Outcome.STORED:
            group = self._groups.setdefault(ticket.partition, {}).setdefault(ticket.place, {})
            if sample is None and self._ledger.produced_by in slabs:
                group.clear()  # a whole group replaces a half-written one
            for name, slab in slabs.items():
                self._add(group, name, slab, row, sample)
        return outcome

    def _add(self, group: dict[str, Cells], name: str, slab: Slab, row: int, sample: int | None) -> None:
        """Keep a column of a group; what is there stays, as the ledger has it."""
        if sample is None and name not in group:
            group[name] = [(slab, row)]
            return
        size = self._ledger.samples
        cells = group.setdefault(name, [None] * size)
        if len(cells) == size:
            for i in range(size) if sample is None else [sample]:
                if cells[i] is None:
                    cells[i] = (slab, row + i if sample is None else row)

    def _free_unless_held(self, ticket: Ticket) -> None:
        """Let go of a group that the ledger has dropped."""
        if ticket.partition in self._groups and not self._ledger.holds(ticket):
            self._groups[ticket.partition].pop(ticket.place, None)

    def _held(self, ticket: Ticket) -> dict[str, Cells]:
        if not self._ledger.holds(ticket):
            raise ContractError(f"get: {ticket} holds no group (any more); was it dropped, or never put?")
        return self._groups[ticket.partition][ticket.place]

    def _pieces(self, name: str, tickets: Sequence[Ticket], groups: Iterable[dict[str, Cells]]) -> list[Slab]:
        """The column's rows as few slices of what was put, in the order of the tickets."""
        runs: list[tuple[Slab, int, int]] = []
        for ticket, group in zip(tickets, groups, strict=True):
            cells = group.get(name, [None])
            rows = self._ledger.samples // len(cells)
            for cell in cells:
                if cell is None:
                    raise ContractError(f"get: column {name!r} is not ready in {ticket}; it has {sorted(group)}")
                slab, row = cell
                if runs and runs[-1][0] is slab and runs[-1][2] == row:
                    runs[-1] = (slab, runs[-1][1], row + rows)
                else:
                    runs.append((slab, row, row + rows))
        return [slab if start == 0 and stop == len(slab) else slab[start:stop] for slab, start, stop in runs]

    def _wait(self, deadline: Deadline, awaited: str, blocker: Callable[[], str]) -> None:
        """Sleep until something changes, a lease expires, or the time is over, which raises ``DeadlineError``."""
        if deadline.left == 0.0:
            deadline.check(awaited, blocker())
        expiry = self._ledger.next_expiry()
        until = deadline.left if expiry is None else min(deadline.left, max(0.0, expiry - time.monotonic()))
        self._changed.wait(until)

    def _blocker(self, partition: int | None, task: str | None) -> str:
        now = time.monotonic()
        numbers = [partition] if partition is not None else self._ledger.live_partitions()
        return "; ".join(self._ledger.status(n, now).blocker(task) for n in numbers) or "producers: nothing was put"

    def _full(self) -> str:
        ledger, now = self._ledger, time.monotonic()
        lines = [f"full: {ledger.held} of {ledger.capacity} groups held"]
        for number in ledger.live_partitions()[:1]:
            status = ledger.status(number, now)
            readers = ", ".join(f"task {task!r} has consumed {p.acked}" for task, p in status.tasks.items())
            lines.append(
                f"partition {number} has {status.filled} of {status.tickets} groups filled and was not dropped"
                + (f"; {readers}" if readers else "; no task reads it")
            )
        return "; ".join(lines)

    def _check_identity(self, tickets: Sequence[Ticket], data: DataProto, sample: int | None) -> None:
        if not any(name in data.batch for name in IDENTITY):
            return
        right = _identity(tickets, self._ledger.samples, sample)
        for name, expected in zip(IDENTITY, right, strict=True):
            if name in data.batch and not torch.equal(data.dense(name).cpu(), expected):
                raise ContractError(
                    f"put: column {name!r} must be {expected.tolist()[:8]}… as the tickets say, "
                    f"got {data.dense(name).tolist()[:8]}…"
                )


def _identity(tickets: Sequence[Ticket], samples: int, sample: int | None) -> tuple[Tensor, Tensor]:
    """``group_ids`` (= place of the ticket) and ``sample_index`` (= index in the group) of rows in ticket order."""
    places = torch.tensor([ticket.place for ticket in tickets], dtype=torch.int64)
    if sample is not None:
        return places, torch.full_like(places, sample)
    return places.repeat_interleave(samples), torch.arange(samples).repeat(len(tickets))


def _join(pieces: list[Slab]) -> Slab:
    if len(pieces) == 1:
        return pieces[0]
    ragged = [piece for piece in pieces if isinstance(piece, Ragged)]
    if ragged:
        return Ragged.concat(ragged)
    tensors = [piece for piece in pieces if isinstance(piece, Tensor)]
    if tensors:
        return torch.cat(tensors)
    return [item for piece in pieces if isinstance(piece, list) for item in piece]
