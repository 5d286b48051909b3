"""A storage unit of the Ray store: an actor that holds the tensors of its share of the groups, in its own memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Sequence
from typing import Any

from tandem.base.deadline import Deadline
from tandem.dataflow.group_storage import Columns, GroupStorage, join
from tandem.dataflow.progress import Outcome
from tandem.dataflow.ray.controller import Written
from tandem.dataflow.tickets import Ticket
from tandem.remote.calls import end_with_node
from tandem.remote.payload import Packed, pack, unpack


class StorageUnit:
    """Every write and drop of its groups passes through it, one at a time, so that the ledger's decision and the data
    never part. ``controller`` is the actor that holds the ledger.

    A put is copied into the unit's memory before it counts: whoever made it may die afterwards.
    """

    def __init__(self, controller: Any, samples: int) -> None:
        end_with_node()
        self._controller = controller
        self._samples = samples
        self._storage = GroupStorage(samples)
        self._one_writer = asyncio.Lock()

    async def put(self, tickets: Sequence[Ticket], packed: Packed, seconds: float) -> list[Outcome]:
        """Return the unit's part of a ``DataPlane.put``; ``packed`` is a dict of columns."""
        deadline = Deadline(seconds)
        columns: Columns = unpack(packed.copied())
        outcomes: list[Outcome] = []
        while True:
            rest = tickets[len(outcomes) :]
            async with self._one_writer:
                written: Written = await self._controller.write.remote(rest, list(columns))
                self._free(rest, written)
                for i, outcome in enumerate(written.outcomes, len(outcomes)):
                    if outcome is Outcome.STORED:
                        self._storage.add(tickets[i], columns, i * self._samples)
            outcomes += written.outcomes
            if written.error is not None:
                raise written.error
            if len(outcomes) == len(tickets):
                return outcomes
            deadline.check(f"room for {tickets[len(outcomes)]}", written.blocker)
            await self._controller.await_change.remote(written.change, deadline.left)

    async def drop(self, ticket: Ticket, reason: str) -> Outcome:
        """Have the controller drop a group or one ``sample`` of it, and free what nobody needs then."""
        async with self._one_writer:
            written: Written = await self._controller.drop.remote(ticket, reason)
            self._free([ticket], written)
        if written.error is not None:
            raise written.error
        return written.outcomes[0]

    async def drop_partition(self, partition: int) -> None:
        """Let go of a partition that the ledger has retired."""
        async with self._one_writer:
            self._storage.free_partition(partition)

    async def get(self, tickets: Sequence[Ticket], columns: Collection[str]) -> Packed:
        """Return the columns of the groups in the order of ``tickets``, a packed dict.

        It waits for a write under way: the ledger may have lent what that is about to store.
        """
        async with self._one_writer:
            pieces = self._storage.pieces(tickets, columns)
        return pack({name: join(cut) for name, cut in pieces.items()})

    async def pid(self) -> int:
        """Return the process id of this actor, which also shows that it answers."""
        return os.getpid()

    def _free(self, tickets: Sequence[Ticket], written: Written) -> None:
        """Let go of groups that the ledger has dropped."""
        for ticket, held in zip(tickets, written.held, strict=False):
            if not held:
                self._storage.free(ticket)
