"""One partition of the ledger: P groups, their readiness column by column, and who has read them. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any, Literal, TypeAlias

Order: TypeAlias = Literal["arrival", "canonical"]

_ACKED = -1


class Group:
    """The group under one ticket. Sets of samples are bit masks: bit ``i`` is sample ``i``."""

    __slots__ = ("attempt", "engine", "failed", "filled", "ready", "reason", "since")

    def __init__(self, attempt: int, now: float) -> None:
        self.attempt = attempt
        self.since = now  # when the ticket was opened, or handed to `engine`
        self.engine: str | None = None
        self.ready: dict[str, int] = {}  # column -> samples that have it
        self.failed = 0  # samples that will never be ready
        self.reason = ""  # of the first failure
        self.filled = False  # every sample settled, none failed

    def has(self, column: str) -> int:
        """The samples of the group that have ``column``, one bit each."""
        return self.ready.get(column, 0)


class Reader:
    """How far one task has read one partition. Invariant: ``eligible`` and ``claimed`` are disjoint."""

    __slots__ = ("acked", "claimed", "columns", "eligible", "head")

    def __init__(self, columns: frozenset[str]) -> None:
        self.columns = columns
        self.eligible: OrderedDict[int, None] = OrderedDict()  # groups ready and not claimed, by arrival
        self.claimed: dict[int, int] = {}  # group -> lease id, or _ACKED
        self.head = 0  # the lowest group that may be unclaimed
        self.acked = 0

    def choose(self, count: int, groups: int, order: Order) -> list[int] | None:
        """The next ``count`` groups, or all that are left if fewer; None while they aren't all ready."""
        want = min(count, groups - len(self.claimed))
        if want == 0 or len(self.eligible) < want:
            return None
        if order == "arrival":
            return list(islice(self.eligible, want))
        chosen: list[int] = []
        index = self.head
        while len(chosen) < want:
            if index not in self.claimed:
                if index not in self.eligible:
                    return None
                chosen.append(index)
            index += 1
        return chosen

    def claim(self, chosen: Iterable[int], lease: int) -> None:
        """Lend the ``chosen`` groups under the lease with this number."""
        for index in chosen:
            del self.eligible[index]
            self.claimed[index] = lease
        while self.head in self.claimed:
            self.head += 1

    def acknowledge(self, index: int, lease: int) -> None:
        """The group is consumed, if it is still this lease's (its attempt may have been dropped meanwhile)."""
        if self.claimed.get(index) == lease:
            self.claimed[index] = _ACKED
            self.acked += 1

    def give_back(self, indices: Collection[int], lease: int) -> None:
        """The groups can be lent again, before those that came later."""
        for index in reversed(list(indices)):
            if self.claimed.get(index) == lease:
                del self.claimed[index]
                self.eligible[index] = None
                self.eligible.move_to_end(index, last=False)
                self.head = min(self.head, index)

    def forget(self, index: int) -> None:
        """The group was dropped: nothing of it is ready or read."""
        self.eligible.pop(index, None)
        if self.claimed.pop(index, None) == _ACKED:
            self.acked -= 1
        self.head = min(self.head, index)

    def consumed(self) -> list[int]:
        """The groups that the task has acknowledged, in order."""
        return sorted(index for index, lease in self.claimed.items() if lease == _ACKED)

    def restore_consumed(self, indices: Collection[int]) -> None:
        """Consumed in an earlier life of the ledger."""
        for index in indices:
            self.eligible.pop(index, None)
            self.claimed[index] = _ACKED
            self.acked += 1

    def leases(self) -> set[int]:
        """Ids of the leases that hold groups."""
        return set(self.claimed.values()) - {_ACKED}


class Partition:
    """The groups of one training step."""

    def __init__(self, tickets: int, samples: int, produced_by: str, settled_by: frozenset[str], now: float) -> None:
        self.groups = [Group(0, now) for _ in range(tickets)]
        self.everyone = (1 << samples) - 1
        self.produced_by = produced_by
        self.settled_by = settled_by
        self.readers: dict[str, Reader] = {}
        self.stored = 0  # groups that hold data
        self.filled = 0
        self.sealed = False
        self.drops: Counter[str] = Counter()  # groups, by reason

    def write(self, index: int, columns: Collection[str], samples: int) -> None:
        """``samples`` of a group have ``columns`` now."""
        group = self.groups[index]
        self.stored += not group.ready
        completed = False
        for column in columns:
            have = group.ready.get(column, 0) | samples
            group.ready[column] = have
            completed |= have == self.everyone
        if completed:
            self._refresh(index, group)

    def fail(self, index: int, sample: int, reason: str) -> None:
        """One sample will never be ready."""
        group = self.groups[index]
        group.failed |= sample
        group.reason = group.reason or reason
        if group.filled:
            group.filled = False
            self.filled -= 1
        for reader in self.readers.values():
            reader.eligible.pop(index, None)

    def ended(self, group: Group) -> int:
        """Samples of the group that were produced or have failed."""
        return group.has(self.produced_by) | group.failed

    def queued(self) -> int:
        """The number of samples in this partition, failed ones included."""
        return sum(self.ended(group).bit_count() for group in self.groups)

    def settled(self, group: Group) -> bool:
        """Whether every sample has reached its end: all of ``settled_by``, or failure."""
        done = self.everyone
        for column in self.settled_by:
            done &= group.ready.get(column, 0)
        return done | group.failed == self.everyone

    def reopen(self, index: int, attempt: int, now: float) -> None:
        """Forget the group; its ticket waits for the draw ``attempt``."""
        group = self.groups[index]
        self.stored -= bool(group.ready)
        self.filled -= group.filled
        for reader in self.readers.values():
            reader.forget(index)
        self.groups[index] = Group(attempt, now)

    def reader(self, task: str, columns: frozenset[str]) -> Reader:
        """The task's place in this partition; its first call looks through the groups once, in ticket order."""
        if task not in self.readers:
            reader = self.readers[task] = Reader(columns)
            for index, group in enumerate(self.groups):
                if self._complete(group, columns):
                    reader.eligible[index] = None
        return self.readers[task]

    def lacking(self, columns: Iterable[str]) -> dict[str, int]:
        """Column -> number of groups in which not every sample has it; only columns that some group lacks."""
        gaps = {c: sum(group.has(c) != self.everyone for group in self.groups) for c in columns}
        return {column: gap for column, gap in gaps.items() if gap}

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON data, without what is lent."""
        return {
            "groups": [[group.attempt, group.filled, dict(group.ready)] for group in self.groups],
            "half_written": sum(self.ended(group).bit_count() for group in self.groups if not group.filled),
            "sealed": self.sealed,
            "drops": dict(self.drops),
            "consumed": {task: reader.consumed() for task, reader in self.readers.items()},
        }

    def load_state_dict(self, state: dict[str, Any], columns_of: Mapping[str, frozenset[str]]) -> int:
        """Fill a fresh partition with what ``state`` holds whole; says how many samples were in half-written groups."""
        for index, (attempt, filled, ready) in enumerate(state["groups"]):
            self.groups[index].attempt = attempt
            if filled:
                for column, samples in ready.items():
                    self.write(index, [column], samples)
        self.sealed = state["sealed"]
        self.drops.update(state["drops"])
        for task, consumed in state["consumed"].items():
            self.reader(task, columns_of[task]).restore_consumed(consumed)
        return int(state["half_written"])

    def _complete(self, group: Group, columns: frozenset[str]) -> bool:
        return not group.failed and all(group.has(column) == self.everyone for column in columns)

    def _refresh(self, index: int, group: Group) -> None:
        if not group.filled and not group.failed and self._complete(group, self.settled_by):
            group.filled = True
            self.filled += 1
        for reader in self.readers.values():
            if index not in reader.claimed and index not in reader.eligible and self._complete(group, reader.columns):
                reader.eligible[index] = None
