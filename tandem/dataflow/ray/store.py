"""The data plane over Ray: one actor keeps the ledger, ``num_data_storage_units`` actors hold the tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from tandem.base.deadline import Deadline
from tandem.base.errors import DiedError
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.dataflow.group_storage import Column, Columns, as_batch, as_columns, without_identity
from tandem.dataflow.ledger import TRAINED, Ledger
from tandem.dataflow.progress import Outcome, PlaneStatus
from tandem.dataflow.ray.controller import Controller, Taken
from tandem.dataflow.ray.storage_unit import StorageUnit
from tandem.dataflow.store import DataPlane
from tandem.dataflow.tickets import Lease, Request, Ticket
from tandem.remote.calls import REPLY_SECONDS, START_SECONDS, Remote, import_ray, name_in_cluster
from tandem.remote.payload import pack, unpack

_LONGEST_CALL = 5.0
"""Seconds of one call that waits: a consumer that dies leaves nobody waiting for longer."""


class RayStore(DataPlane):
    """A ``DataPlane`` for any number of processes: a handle, to be sent to whoever puts or takes.

    A group lives in the unit that its place falls to, neighbours together. Data travels only between the caller and the
    units, as flat values; what arrives is read only. A unit or controller that dies ends every call that needs it with
    a ``DiedError``: its data is lost, and so is the run's place, until it resumes from a checkpoint.
    """

    def __init__(self, controller: Remote, units: Sequence[Remote], tickets: int, samples: int) -> None:
        self._controller = controller
        self._units = tuple(units)
        self._tickets = tickets
        self._samples = samples

    @classmethod
    def start(cls, ledger: Ledger, lease_seconds: float, units: int) -> RayStore:
        """Start the actors on the cluster that this process is connected to; they take no device."""
        ray = import_ray()
        light = {"num_cpus": 0, "max_restarts": 0}
        name = "the controller of the data plane"
        controller = ray.remote(Controller).options(name=name_in_cluster(name), **light).remote(ledger, lease_seconds)
        storage, remotes = ray.remote(StorageUnit), []
        for unit in (f"storage unit {i} of the data plane" for i in range(units)):
            actor = storage.options(name=name_in_cluster(unit), **light, scheduling_strategy="SPREAD")
            remotes.append(Remote(actor.remote(controller, ledger.samples), unit))
        store = cls(Remote(controller, name), remotes, ledger.tickets, ledger.samples)
        store.pids()  # a store that can't start fails here
        return store

    def assign(self, ticket: Ticket, engine: str) -> None:
        """Tell the controller that ``engine`` has begun to fill the ticket."""
        self._controller.ask("assign", ticket, engine)

    def put(self, tickets: Sequence[Ticket], data: DataProto, *, timeout: float) -> list[Outcome]:
        """Send each group to its storage unit, all units at once; outcomes are in the order of ``tickets``."""
        columns = as_columns(tickets, data, self._samples)
        replies = []
        for home, places in self._shares(tickets).items():
            share = columns if len(places) == len(tickets) else _choose(columns, places, self._samples)
            mine = [tickets[i] for i in places]
            awaited = f"the put of {len(mine)} groups, {mine[0]} among them"
            replies.append((places, self._units[home].submit("put", mine, pack(share), timeout, awaited=awaited)))
        outcomes: dict[int, Outcome] = {}
        for places, reply in replies:
            outcomes.update(zip(places, reply.within(timeout + REPLY_SECONDS), strict=True))
        return [outcomes[i] for i in range(len(tickets))]

    def take(self, request: Request, *, timeout: float) -> Lease | None:
        """Ask the controller for a lease, in calls short enough for a lost one to be noticed."""
        deadline = Deadline(timeout)
        request = replace(request, columns=without_identity(request.columns))
        while True:
            seconds = min(deadline.left, _LONGEST_CALL)
            taken: Taken = self._controller.ask("take", request, seconds, waits=seconds, awaited=str(request))
            if taken.lease is not None or taken.exhausted:
                return taken.lease
            deadline.check(str(request), taken.blocker)

    def acknowledge(self, lease: Lease) -> None:
        """Tell the controller that the task has consumed the lease's groups."""
        self._controller.ask("acknowledge", lease)

    def get(self, tickets: Sequence[Ticket], columns: Collection[str]) -> DataProto:
        """Fetch the columns from all storage units at once, in the order of ``tickets``. Read only."""
        names = without_identity(columns)
        awaited = f"columns {sorted(names)} of {len(tickets)} groups"
        replies = []
        for home, places in self._shares(tickets).items():
            mine = [tickets[i] for i in places]
            replies.append((places, mine, self._units[home].submit("get", mine, names, awaited=awaited)))
        parts = [as_batch(mine, self._samples, unpack(reply.within(REPLY_SECONDS))) for _, mine, reply in replies]
        if len(parts) == 1:
            return parts[0]
        arrived, joined = [i for places, _, _ in replies for i in places], DataProto.concat(parts)
        if arrived == list(range(len(tickets))):
            return joined
        return joined[_rows_of(torch.tensor(arrived).argsort(), self._samples)]

    def seal(self, partition: int, *, timeout: float) -> None:
        """Wait, in short calls to the controller, until every ticket of the partition is filled."""
        deadline, awaited = Deadline(timeout), f"the seal of partition {partition}"
        while True:
            seconds = min(deadline.left, _LONGEST_CALL)
            blocker: str | None = self._controller.ask("seal", partition, seconds, waits=seconds, awaited=awaited)
            if blocker is None:
                return
            deadline.check(awaited, blocker)

    def status(self) -> PlaneStatus:
        """Return the controller's counts of every partition and task at this moment."""
        status: PlaneStatus = self._controller.ask("status")
        return status

    def drop(self, target: Ticket | int, reason: str = TRAINED) -> Outcome:
        """Drop a partition in all units, or a group in its own; the controller keeps the books."""
        if isinstance(target, int):
            self._controller.ask("retire", target, reason)
            for reply in [unit.submit("drop_partition", target) for unit in self._units]:
                reply.within(REPLY_SECONDS)
            return Outcome.DROPPED
        outcome: Outcome = self._units[self._home(target)].ask("drop", target, reason)
        return outcome

    def pids(self) -> dict[str, int]:
        """Return the process of each actor, by its name."""
        actors = (self._controller, *self._units)
        replies = [actor.submit("pid", awaited="its start") for actor in actors]
        return {actor.name: reply.within(START_SECONDS) for actor, reply in zip(actors, replies, strict=True)}

    def silent(self, seconds: float) -> list[str]:
        """Return the actors that give no sign of life within so many seconds, in words."""
        actors = (self._controller, *self._units)
        replies = [(actor.name, actor.submit("pid", awaited="a sign of life")) for actor in actors]
        end, found = Deadline(seconds), []
        for name, reply in replies:
            try:
                reply.result(end.left)
            except TimeoutError:
                found.append(f"{name} does not answer")
            except DiedError as error:
                found.append(str(error))
        return found

    def close(self) -> None:
        """End the actors; the data is gone."""
        for actor in (*self._units, self._controller):
            actor.kill()

    def _home(self, ticket: Ticket) -> int:
        """Return the unit of a group: fixed, so that one unit sees everything that happens to it. Neighbours share
        one.
        """
        return ticket.place * len(self._units) // self._tickets

    def _shares(self, tickets: Sequence[Ticket]) -> dict[int, list[int]]:
        """Return which of the tickets, by index, live in which unit."""
        shares: dict[int, list[int]] = defaultdict(list)
        for i, ticket in enumerate(tickets):
            shares[self._home(ticket)].append(i)
        return shares


def _choose(columns: Columns, groups: Sequence[int], rows: int) -> Columns:
    """Return the rows of some groups of ``rows`` rows each; views where the groups are neighbours."""
    first, last = groups[0], groups[-1]
    if list(groups) == list(range(first, last + 1)):
        return {name: column[first * rows : (last + 1) * rows] for name, column in columns.items()}
    chosen = _rows_of(torch.tensor(groups), rows)
    return {name: _choose_rows(column, chosen) for name, column in columns.items()}


def _choose_rows(column: Column, rows: torch.Tensor) -> Column:
    if isinstance(column, list):
        return [column[i] for i in rows.tolist()]
    return column[rows] if isinstance(column, Ragged) else column[rows.to(column.device)]


def _rows_of(groups: torch.Tensor, rows: int) -> torch.Tensor:
    """Turn (G,) groups into their (G * rows,) rows."""
    return (groups[:, None] * rows + torch.arange(rows)).flatten()
