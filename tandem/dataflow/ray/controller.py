"""The controller of the Ray store: the ledger in an actor of its own, with a clock. It holds no tensors.

Its methods run one at a time on the actor's event loop and give it up only while they wait for a change, so that
consumers who wait never keep a producer out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tandem.base.errors import TandemError
from tandem.dataflow.diagnosis import plane_status, what_fills, who_blocks
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.progress import Outcome, PlaneStatus
from tandem.dataflow.tickets import Lease, Request, Ticket
from tandem.remote.calls import end_with_node


@dataclass(frozen=True)
class Written:
    """What became of the first tickets of a put or drop, and which of them hold data now.

    It ends before the first ticket that found no room (``blocker`` says why) or met ``error``; ``held_at_error`` says
    whether that ticket holds data still. ``change`` counts the changes so far.
    """

    outcomes: tuple[Outcome, ...]
    held: tuple[bool, ...]
    change: int
    blocker: str = ""
    error: TandemError | None = None


@dataclass(frozen=True)
class Taken:
    """``lease``, or None: then the task has either consumed the partition (``exhausted``) or waits for ``blocker``."""

    lease: Lease | None
    exhausted: bool = False
    blocker: str = ""


class Controller:
    """The ledger behind asynchronous calls. ``seconds`` of a wait are at most what the caller has left."""

    def __init__(self, ledger: Ledger, lease_seconds: float) -> None:
        end_with_node()
        self._ledger = ledger
        self._lease_seconds = lease_seconds
        self._change = 0
        self._next_change = asyncio.Event()

    async def assign(self, ticket: Ticket, engine: str) -> None:
        """Note that ``engine`` has begun to fill the ticket: a stall will be blamed on it."""
        self._ledger.assign(ticket, engine, time.monotonic())

    async def write(self, tickets: Sequence[Ticket], columns: Collection[str]) -> Written:
        """Put the tickets one after the other, until one finds no room or is refused. See ``Ledger.put``."""
        outcomes: list[Outcome] = []
        blocker, error = "", None
        for ticket in tickets:
            try:
                outcome = self._ledger.put(ticket, columns, time.monotonic())
            except TandemError as problem:
                error = problem
                break
            if outcome is Outcome.FULL:
                blocker = what_fills(self._ledger, time.monotonic())
                break
            outcomes.append(outcome)
        return self._written(tickets, outcomes, blocker, error)

    async def drop(self, ticket: Ticket, reason: str) -> Written:
        """Drop a group, or note that one ``sample`` of it failed; an error travels in the answer."""
        try:
            outcome = self._ledger.drop(ticket, reason, time.monotonic())
        except TandemError as problem:
            return self._written([ticket], [], "", problem)
        return self._written([ticket], [outcome], "", None)

    async def retire(self, partition: int, reason: str) -> None:
        """Forget a partition whose groups are no longer needed, and wake whoever waits for it."""
        self._ledger.retire(partition, reason)
        self._changed()

    async def await_change(self, seen: int, seconds: float) -> None:
        """Return once there were more changes than ``seen``, or the time is over."""
        if self._change == seen:
            await self._wait(seconds)

    async def take(self, request: Request, seconds: float) -> Taken:
        """Lend groups as soon as there are some; see ``Ledger.take``."""
        until, partition = time.monotonic() + seconds, request.partition
        while partition is None or not self._ledger.exhausted(request.task, partition):
            now = time.monotonic()
            lease = self._ledger.take(request, now=now, seconds=self._lease_seconds)
            if lease is not None:
                return Taken(lease)
            if now >= until:
                return Taken(None, blocker=who_blocks(self._ledger, partition, request.task, now))
            await self._wait(until - now)
        return Taken(None, exhausted=True)

    async def acknowledge(self, lease: Lease) -> None:
        """Count the groups of a lease as consumed by its task."""
        self._ledger.acknowledge(lease, time.monotonic())
        self._changed()

    async def seal(self, partition: int, seconds: float) -> str | None:
        """Seal the partition; the answer is None, or what it waits for where that takes longer."""
        until = time.monotonic() + seconds
        while not self._ledger.seal(partition, now := time.monotonic()):
            if now >= until:
                return who_blocks(self._ledger, partition, None, now)
            await self._wait(until - now)
        return None

    async def status(self) -> PlaneStatus:
        """Return the counts of every partition and task at this moment."""
        return plane_status(self._ledger, time.monotonic())

    async def pid(self) -> int:
        """Return the process id of this actor, which also shows that it answers."""
        return os.getpid()

    def _written(
        self, tickets: Sequence[Ticket], outcomes: list[Outcome], blocker: str, error: TandemError | None
    ) -> Written:
        self._changed()
        held = tuple(self._ledger.holds(ticket) for ticket in tickets[: len(outcomes) + (error is not None)])
        return Written(tuple(outcomes), held, self._change, blocker, error)

    def _changed(self) -> None:
        self._change += 1
        self._next_change.set()
        self._next_change = asyncio.Event()

    async def _wait(self, seconds: float) -> None:
        """Wait until something changes, a lease expires, or the time is over."""
        expiry = self._ledger.next_expiry()
        until = seconds if expiry is None else min(seconds, max(0.0, expiry - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._next_change.wait(), until)
