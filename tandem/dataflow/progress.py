"""What the ledger answers: what became of a write, where the samples are, who keeps whom waiting. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from tandem.base.errors import ContractError
from tandem.dataflow.tickets import Ticket

_NAMED = 4  # open tickets listed in a message, the longest waiting first


class Outcome(Enum):
    """What became of a write or a drop."""

    STORED = auto()
    DROPPED = auto()  # the group is gone; its ticket is open again
    DUPLICATE = auto()  # the same was there already: the first one stays
    STALE = auto()  # for a draw that was given up, or a partition that is over
    FULL = auto()  # no room: keep it and try again


@dataclass(frozen=True)
class Accounts:
    """Where all samples went. Every draw of a ticket counts its n samples."""

    produced: int
    trained: int
    queued: int
    dropped: dict[str, int]

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        dropped = f"{sum(self.dropped.values())}" + (f" ({reasons})" if reasons else "")
        return f"produced {self.produced}, trained {self.trained}, dropped {dropped}, left in the queue {self.queued}"

    def __add__(self, other: Accounts) -> Accounts:
        """Return the accounts of two parts of a run together."""
        dropped = dict(self.dropped)
        for reason, count in other.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
        return Accounts(
            self.produced + other.produced, self.trained + other.trained, self.queued + other.queued, dropped
        )

    def ended(self) -> Accounts:
        """Return the accounts once another part goes on from this one: its queue is generated again, and so dropped."""
        lost = {} if self.queued == 0 else {"generated again after a resume": self.queued}
        return Accounts(self.produced, self.trained, 0, self.dropped) + Accounts(0, 0, 0, lost)

    def check(self) -> None:
        """Raise ``ContractError`` unless produced = trained + queued + dropped."""
        if self.produced != self.trained + self.queued + sum(self.dropped.values()):
            raise ContractError(f"samples are not conserved: {self}")


@dataclass(frozen=True)
class OpenTicket:
    """A ticket without a whole group, and who fills it (None: nobody).

    ``lacking`` are the columns that a group lacks which is generated; none before. ``seconds`` is how long the group is
    being generated, or has been waiting for those columns.
    """

    ticket: Ticket
    engine: str | None
    seconds: float
    lacking: tuple[str, ...] = ()

    def describe(self, gone: Collection[str] = ()) -> str:
        """Return the ticket in a message; the engines ``gone`` have died since they got it."""
        engine = f"on engine {self.engine!r}" if self.engine else "given to no engine"
        if self.engine in gone and not self.lacking:
            engine = f"given back, for engine {self.engine!r} died,"
        waits = f", generated, waits for {' and '.join(self.lacking)}" if self.lacking else ""
        return f"ticket {self.ticket.place} (attempt {self.ticket.attempt}) {engine}{waits} for {self.seconds:.1f} s"


@dataclass(frozen=True)
class TaskProgress:
    """What a task can take, holds and has consumed, in groups; ``lacking``: column -> groups without it."""

    ready: int
    leased: int
    acked: int
    holders: tuple[str, ...]
    lacking: dict[str, int]


@dataclass(frozen=True)
class PartitionStatus:
    """One partition at one moment. ``drops``: groups dropped so far, by reason."""

    partition: int
    tickets: int
    filled: int
    sealed: bool
    open: tuple[OpenTicket, ...]
    tasks: dict[str, TaskProgress]
    drops: dict[str, int]

    def blocker(self, task: str | None = None, gone: Collection[str] = ()) -> str:
        """Return who or what keeps ``task`` (None: the seal) waiting, in words; the engines ``gone`` have died."""
        causes = []
        if self.open:
            longest = sorted(self.open, key=lambda entry: -entry.seconds)
            more = f", and {len(longest) - _NAMED} more" if len(longest) > _NAMED else ""
            generated = sum(bool(entry.lacking) for entry in self.open)
            causes.append(
                f"{len(longest)} of {self.tickets} groups unfilled"
                + (f", {generated} of them generated" if generated else "")
                + f": {', '.join(entry.describe(gone) for entry in longest[:_NAMED])}{more}"
            )
            if self.drops:
                causes.append("dropped so far: " + ", ".join(f"{n} x {reason}" for reason, n in self.drops.items()))
        if task is not None and task in self.tasks:
            progress = self.tasks[task]
            if progress.lacking and not self.open:
                lacking = ", ".join(f"{column} in {gap} groups" for column, gap in progress.lacking.items())
                causes.append(f"columns not there yet: {lacking}")
            if progress.leased:
                holders = ", ".join(holder or "an unnamed consumer" for holder in progress.holders)
                causes.append(f"{progress.leased} groups lent to {holders}")
        return f"partition {self.partition}: " + ("; ".join(causes) or "every group is there and was taken")


@dataclass(frozen=True)
class PlaneStatus:
    """The whole data plane at one moment: ``held`` of ``capacity`` groups, every live partition, every sample."""

    held: int
    capacity: int
    partitions: dict[int, PartitionStatus]
    accounts: Accounts
