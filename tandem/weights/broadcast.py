"""One snapshot to many receivers at once: who takes part, in which group, and what becomes of it where somebody dies.

The receivers keep what comes beside the weights that serve, and take it over afterwards, each when it may. So whatever
happens on the way, every engine goes on with the version that it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Protocol, runtime_checkable

import torch

from tandem.base.deadline import Deadline
from tandem.base.errors import DeadlineError, TandemError
from tandem.models.fingerprint import joined
from tandem.transport.circle import BrokenCircleError, Meeting, open_store
from tandem.weights.sync import Receiver, Snapshot
from tandem.weights.transfer import Transfer

logger = logging.getLogger(__name__)

_LOOK_S = 0.01
_BLAME_S = 1.0  # in which whoever only waits for others ends once a broadcast is given up
_SETTLE_S = 60.0  # for all to end once a broadcast is given up: by then a process that hangs has been found to
_KNOWN = 2  # groups that are used again
_TRIES = 3  # of a broadcast that breaks and nobody is at fault


class Member(Protocol):
    """A process at the receiving end. ``HostedEngine`` is one, and each rank of a role that scores."""

    @property
    def name(self) -> str:
        """Who it is, for messages."""

    def receive(self, meeting: Meeting, index: int, senders: int, number: int, piece_bytes: int) -> None:
        """Have it receive the snapshot ``number`` as member ``index`` of the groups of all senders; returns once it
        has all. Raises ``BrokenCircleError`` where that is another's fault.
        """

    def give_up(self, key: str) -> None:
        """Have it end what it receives in the groups of ``key``; doesn't wait."""


@runtime_checkable
class Reached(Protocol):
    """A receiver that a broadcast can reach. ``UpdatedWorker`` is one, and ``ForwardModel``."""

    def members(self, version: int) -> Sequence[Member]:
        """Return its processes; none where it leaves this version out, or is in the process that sends."""


class Senders(Protocol):
    """The train ranks that keep and send a part each. ``SendingRanks`` is one."""

    def __len__(self) -> int:
        """Return how many there are."""

    def name_of(self, index: int) -> str:
        """Say who one is, for messages."""

    def open(self, number: int) -> None:
        """Begin a snapshot of the weights of this moment."""

    def gather(self, number: int) -> None:
        """Gather it; nothing may train meanwhile."""

    def send(self, index: int, meeting: Meeting, number: int, piece_bytes: int) -> None:
        """Have one send its part, as it is gathered. Raises ``BrokenCircleError`` where a receiver is gone."""

    def give_up(self, index: int, key: str) -> None:
        """Have one end what it sends in the group ``key``."""

    def parts(self, number: int) -> Sequence[tuple[str, int]]:
        """Return fingerprint and bytes of the part of each, once all is gathered."""

    def pairs(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is kept, where the only sender is this process."""


class BroadcastWeights:
    """The weights of snapshot ``number``, which receivers have beside their own once it was broadcast."""

    def __init__(self, number: int, senders: Senders) -> None:
        self.number = number
        self.senders = senders
        self._parts: Sequence[tuple[str, int]] | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.senders.pairs(self.number)

    @property
    def nbytes(self) -> int:
        """Bytes that each receiver gets."""
        return sum(nbytes for _, nbytes in self.parts())

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all pairs."""
        return joined(*(digits for digits, _ in self.parts()))

    def parts(self) -> Sequence[tuple[str, int]]:
        """Return fingerprint and bytes by sender, asked once."""
        if self._parts is None:
            self._parts = self.senders.parts(self.number)
        return self._parts


class Broadcast:
    """Brings snapshots of ``senders`` to receivers, over ``backend`` (of ``torch.distributed``).

    Members meet at ``host``, this machine as the others know it. Every wait ends within ``deadline_s``. What is sent at
    once is at most ``piece_bytes``.
    """

    def __init__(self, senders: Senders, *, host: str, backend: str, deadline_s: float, piece_bytes: int) -> None:
        self._senders, self._host, self._backend = senders, host, backend
        self._deadline_s, self._piece_bytes = deadline_s, piece_bytes
        self._store = open_store(host, None, timedelta(seconds=deadline_s))
        self._known: list[tuple[tuple[Member, ...], str]] = []
        self._keys = 0

    def bring(self, number: int, receivers: Mapping[str, Reached], version: int) -> dict[str, BaseException]:
        """Have every receiver keep the snapshot beside its weights; returns what failed in those that have none of it.

        One that dies or hangs is left out, and the others get it without. Raises what failed in a sender, and
        ``DeadlineError`` naming who blocks.
        """
        left = {name: tuple(receiver.members(version)) for name, receiver in receivers.items()}
        left = {name: members for name, members in left.items() if members}
        failed: dict[str, BaseException] = {}
        deadline, tries = Deadline(self._deadline_s), 0
        while left:
            tries += 1
            errors = self._round(number, tuple(member for members in left.values() for member in members), deadline)
            before = len(left)
            for name, members in list(left.items()):
                met = [error for member in members if (error := errors[id(member)]) is not None]
                culprits = [error for error in met if not isinstance(error, BrokenCircleError)]
                if not met or culprits:
                    del left[name]
                if culprits:
                    failed[name] = culprits[0]
                    logger.warning("%s did not get weights version %d: %s", name, version, culprits[0])
            if left and len(left) == before and tries >= _TRIES:
                broken = next(error for members in left.values() for m in members if (error := errors[id(m)]))
                raise TandemError(f"weights version {version} reached none of {', '.join(left)}: {broken}")
        return failed

    def _round(self, number: int, members: tuple[Member, ...], deadline: Deadline) -> dict[int, BaseException | None]:
        """Send once to all ``members``; the error of each, by ``id``. Raises that of a sender which is at fault."""
        key, count = self._key(members), len(self._senders)
        meeting = Meeting(self._host, self._store.port, key, 1 + len(members), self._backend, self._deadline_s)
        sending = [
            Transfer(self._senders.name_of(i), partial(self._senders.send, i, meeting, number, self._piece_bytes))
            for i in range(count)
        ]
        receiving = [
            Transfer(m.name, partial(m.receive, meeting, i, count, number, self._piece_bytes))
            for i, m in enumerate(members, start=1)
        ]
        late: list[str] = []
        try:
            while any(t.under_way for t in (*sending, *receiving)) and not any(t.error for t in (*sending, *receiving)):
                if deadline.left == 0.0:
                    late = [m.name for m, t in zip(members, receiving, strict=True) if t.under_way]
                    break
                time.sleep(_LOOK_S)
        finally:
            if late or any(t.under_way or t.error for t in (*sending, *receiving)):
                self._give_up(key, members)
        if late:
            late = self._stuck([*sending, *receiving]) or late
        self._settle([*sending, *receiving])
        own = [error for t in sending if (error := t.error) and not isinstance(error, BrokenCircleError)]
        if own:
            raise own[0]
        errors = {id(m): t.error for m, t in zip(members, receiving, strict=True)}
        if late and not any(e and not isinstance(e, BrokenCircleError) for e in errors.values()):
            raise DeadlineError(
                f"waited {deadline.seconds:g} s for a broadcast of weights; blocked by {', '.join(late)}"
            )
        return errors

    def _stuck(self, transfers: Sequence[Transfer[None]]) -> list[str]:
        """Name those that don't end soon after a broadcast was given up: the others only waited for them."""
        patience = Deadline(_BLAME_S)
        while patience.left > 0.0 and any(t.under_way for t in transfers):
            time.sleep(_LOOK_S)
        return [t.name for t in transfers if t.under_way]

    def _settle(self, transfers: Sequence[Transfer[None]]) -> None:
        """Wait until all have ended, which they do soon."""
        patience = Deadline(_SETTLE_S)
        while any(t.under_way for t in transfers):
            if patience.left == 0.0:
                names = ", ".join(t.name for t in transfers if t.under_way)
                raise DeadlineError(f"waited {_SETTLE_S:g} s for a broadcast of weights to end; blocked by {names}")
            time.sleep(_LOOK_S)

    def _give_up(self, key: str, members: Sequence[Member]) -> None:
        self._known = [(known, name) for known, name in self._known if name != key]
        for member in members:
            member.give_up(key)
        for i in range(len(self._senders)):
            Transfer(f"give-up-{i}", partial(self._senders.give_up, i, key))

    def _key(self, members: tuple[Member, ...]) -> str:
        """Return the key of the group of these members: the same one while they are the same processes."""
        same = [i for i, (known, _) in enumerate(self._known) if _are(known, members)]
        if same:
            self._known.append(self._known.pop(same[0]))  # the newest
        else:
            self._keys += 1
            self._known = [*self._known[1 - _KNOWN :], (members, f"weights {self._keys}")]
        return self._known[-1][1]


def _are(some: Sequence[Member], others: Sequence[Member]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


class BroadcastSnapshots:
    """Snapshots of ``senders``, for ``WeightSync``: each sender keeps a part, and no process ever has all of them.

    ``base`` gives the fingerprint of what receivers have beside it, where it is adapters alone; it is asked once.
    """

    def __init__(self, senders: Senders, broadcast: Broadcast, base: Callable[[], str] | None = None) -> None:
        self._senders, self._broadcast = senders, broadcast
        self._base = None if base is None else cache(base)
        self._number = 0

    def __call__(self) -> Snapshot:
        """Begin a snapshot of the weights as they are now; its ``spread`` gathers them."""
        beside = () if self._base is None else (self._base(),)
        self._number += 1
        self._senders.open(self._number)
        weights = BroadcastWeights(self._number, self._senders)
        return Snapshot(weights, lambda: joined(weights.fingerprint, *beside), Spread(weights, self._broadcast))


class Spread:
    """``Spreading`` of ``weights`` by a broadcast."""

    def __init__(self, weights: BroadcastWeights, broadcast: Broadcast) -> None:
        self._weights, self._broadcast = weights, broadcast

    @property
    def nbytes(self) -> int:
        """Bytes that each receiver gets."""
        return self._weights.nbytes

    def gather(self) -> None:
        """Gather the weights, each bucket while the one before is sent."""
        self._weights.senders.gather(self._weights.number)

    def bring(self, receivers: Mapping[str, Receiver], version: int) -> Mapping[str, BaseException]:
        """Bring the weights to those that a broadcast reaches; the others take them from where they are."""
        reached = {name: receiver for name, receiver in receivers.items() if isinstance(receiver, Reached)}
        return self._broadcast.bring(self._weights.number, reached, version)
