"""One partition of the ledger: P groups, their readiness column by column, and who has read them. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any, Literal, TypeAlias

Order: TypeAlias = Literal["arrival", "canonical"]

_ACKED = -1


class Group:
    """The group under one ticket: the columns that its samples have."""

    __slots__ = ("attempt", "columns", "engine", "filled", "since")

    def __init__(self, attempt: int, now: float) -> None:
        self.attempt = attempt
        self.since = now  # when the ticket was opened, or handed to `engine`
        self.engine: str | None = None
        self.columns: set[str] = set()
        self.filled = False  # it has every column that settles it


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
        """Return the next ``count`` groups, or all that are left if fewer; None while they aren't all ready."""
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
        """Count the group as consumed, if it is still this lease's (its attempt may have been dropped meanwhile)."""
        if self.claimed.get(index) == lease:
            self.claimed[index] = _ACKED
            self.acked += 1

    def give_back(self, indices: Collection[int], lease: int) -> None:
        """Let the groups be lent again, before those that came later."""
        for index in reversed(list(indices)):
            if self.claimed.get(index) == lease:
                del self.claimed[index]
                self.eligible[index] = None
                self.eligible.move_to_end(index, last=False)
                self.head = min(self.head, index)

    def forget(self, index: int) -> None:
        """Note that the group was dropped: nothing of it is ready or read."""
        self.eligible.pop(index, None)
        if self.claimed.pop(index, None) == _ACKED:
            self.acked -= 1
        self.head = min(self.head, index)

    def consumed(self) -> list[int]:
        """Return the groups that the task has acknowledged, in order."""
        return sorted(index for index, lease in self.claimed.items() if lease == _ACKED)

    def restore_consumed(self, indices: Collection[int]) -> None:
        """Count groups that were consumed in an earlier life of the ledger."""
        for index in indices:
            self.eligible.pop(index, None)
            self.claimed[index] = _ACKED
            self.acked += 1

    def leases(self) -> set[int]:
        """Return the ids of the leases that hold groups."""
        return set(self.claimed.values()) - {_ACKED}


class Partition:
    """The groups of one training step."""

    def __init__(self, tickets: int, settled_by: frozenset[str], now: float) -> None:
        self.groups = [Group(0, now) for _ in range(tickets)]
        self.settled_by = settled_by
        self.readers: dict[str, Reader] = {}
        self.stored = 0  # groups that hold data
        self.filled = 0
        self.sealed = False
        self.drops: Counter[str] = Counter()  # groups, by reason

    def write(self, index: int, columns: Collection[str]) -> None:
        """Note that a group has ``columns`` now."""
        group = self.groups[index]
        self.stored += not group.columns
        group.columns.update(columns)
        if not group.filled and group.columns >= self.settled_by:
            group.filled = True
            self.filled += 1
        for reader in self.readers.values():
            if index not in reader.claimed and index not in reader.eligible and group.columns >= reader.columns:
                reader.eligible[index] = None

    def reopen(self, index: int, attempt: int, now: float) -> None:
        """Forget the group; its ticket waits for the draw ``attempt``."""
        group = self.groups[index]
        self.stored -= bool(group.columns)
        self.filled -= group.filled
        for reader in self.readers.values():
            reader.forget(index)
        self.groups[index] = Group(attempt, now)

    def reader(self, task: str, columns: frozenset[str]) -> Reader:
        """Return the task's place in this partition; its first call looks through the groups once, in ticket order."""
        if task not in self.readers:
            reader = self.readers[task] = Reader(columns)
            for index, group in enumerate(self.groups):
                if group.columns >= columns:
                    reader.eligible[index] = None
        return self.readers[task]

    def lacking(self, columns: Iterable[str]) -> dict[str, int]:
        """Map each column that some group lacks to the number of groups without it."""
        gaps = {column: sum(column not in group.columns for group in self.groups) for column in columns}
        return {column: gap for column, gap in gaps.items() if gap}

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON data, without what is lent."""
        return {
            "groups": [[group.attempt, group.filled, sorted(group.columns)] for group in self.groups],
            "sealed": self.sealed,
            "drops": dict(self.drops),
            "consumed": {task: reader.consumed() for task, reader in self.readers.items()},
        }

    def load_state_dict(self, state: dict[str, Any], columns_of: Mapping[str, frozenset[str]]) -> int:
        """Fill a fresh partition with what ``state`` holds whole; says how many groups were there in part."""
        for index, (attempt, filled, columns) in enumerate(state["groups"]):
            self.groups[index].attempt = attempt
            if filled:
                self.write(index, columns)
        self.sealed = state["sealed"]
        self.drops.update(state["drops"])
        for task, consumed in state["consumed"].items():
            self.reader(task, columns_of[task]).restore_consumed(consumed)
        return sum(bool(columns) and not filled for _, filled, columns in state["groups"])
