"""The receiver's end: a snapshot is kept beside what serves until all of it is there. No half is given out."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch

from tandem.base.errors import ContractError, TandemError
from tandem.models.shared_weights import Place
from tandem.transport.buckets import Bucket, places_of
from tandem.transport.circle import BrokenCircleError, Circles, Meeting
from tandem.transport.outbox import END, FAILED, sender_name

_KEPT = 2  # complete ones: one to take, and one that comes meanwhile


class ReceivedSnapshots:
    """Snapshots of weights by number, one of which may be under way: ``begin``, ``update`` by buckets, then ``finish``
    or ``abort``. Only what is finished is given out by ``take``.

    The one that was taken last is kept, and the newest two that were not. Safe for several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._finished: dict[int, list[Bucket]] = {}
        self._under_way: tuple[int, list[Bucket]] | None = None
        self._taken: int | None = None
        self._spare: list[torch.Tensor] = []

    @property
    def under_way(self) -> int | None:
        """The snapshot that has begun and not ended."""
        return None if self._under_way is None else self._under_way[0]

    @property
    def finished(self) -> list[int]:
        """Snapshots that can be taken, the newest last."""
        with self._lock:
            return sorted(self._finished)

    def begin(self, number: int) -> None:
        """Begin a snapshot, in place of the same one where that is there. Raises while another is under way."""
        with self._lock:
            if self._under_way is not None:
                raise ContractError(f"snapshot {number} begins while {self._under_way[0]} is under way")
            self._finished.pop(number, None)
            self._under_way = number, []

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return memory (``nbytes``,) uint8 for a bucket, used before where there is some."""
        with self._lock:
            for i, old in enumerate(self._spare):
                if old.numel() == nbytes:
                    return self._spare.pop(i)
        return torch.empty(nbytes, dtype=torch.uint8)

    def update(self, bucket: Bucket) -> None:
        """Add a bucket, which is complete."""
        with self._lock:
            if self._under_way is None:
                raise ContractError("a bucket of weights came for no snapshot: begin comes first")
            self._under_way[1].append(bucket)

    def finish(self) -> None:
        """Keep what is under way as a whole snapshot."""
        with self._lock:
            if self._under_way is None:
                raise ContractError("no snapshot is under way that could be finished")
            number, buckets = self._under_way
            self._finished[number], self._under_way = buckets, None
            for old in [kept for kept in sorted(self._finished) if kept != self._taken][:-_KEPT]:
                self._let_go(old)

    def abort(self) -> None:
        """Forget what is under way, if anything is. Its memory is not used again: it may still be written to."""
        with self._lock:
            self._under_way = None

    def take(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Give out the pairs of a finished snapshot, which stays until a newer one is taken; older ones go."""
        with self._lock:
            if number not in self._finished:
                has = f"it has {self.finished}" if self._finished else "it has none"
                raise ContractError(f"snapshot {number} of the weights did not arrive here as a whole: {has}")
            for old in [kept for kept in self._finished if kept < number]:
                self._let_go(old)
            self._taken, buckets = number, self._finished[number]
        return (pair for bucket in buckets for pair in bucket.pairs())

    def _let_go(self, number: int) -> None:
        self._spare = [bucket.data for bucket in self._finished.pop(number)]


@runtime_checkable
class Brought(Protocol):
    """Weights that whoever takes them over has beside its own, as the snapshot ``number``. ``BroadcastWeights`` are."""

    @property
    def number(self) -> int:
        """The number of the snapshot."""


class Inbox:
    """Receives snapshots, one at a time, in memory of the host, whatever goes on beside. ``device``: this process's."""

    def __init__(self, device: torch.device) -> None:
        self._circles = Circles(device)
        self._received, self._receiving = ReceivedSnapshots(), threading.Lock()

    def receive(self, meeting: Meeting, index: int, senders: int, number: int, piece_bytes: int) -> None:
        """Receive the snapshot as member ``index`` of the circles around all senders; returns when all of it is there.

        Raises ``BrokenCircleError`` where a member is gone, ``TandemError`` where the senders gave it up; nothing has
        changed then.
        """
        with self._receiving:
            self._received.begin(number)
            try:
                self._receive(meeting, index, senders, piece_bytes)
                self._received.finish()
            except BaseException:
                self._received.abort()
                self._circles.give_up(meeting.key)
                raise

    def give_up(self, key: str) -> None:
        """End what is received in the groups of ``key``, in any thread."""
        self._circles.give_up(key)

    def take(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Give out the pairs of the snapshot, which has arrived as a whole."""
        return self._received.take(number)

    def _receive(self, meeting: Meeting, index: int, senders: int, piece_bytes: int) -> None:
        names = [sender_name(i) for i in range(senders)]
        circles = [self._circles.enter(meeting, index, name) for name in names]
        position = 0
        while True:
            circle = circles[position % senders]
            head = torch.empty(2, dtype=torch.int64)
            circle.broadcast(head, 0)
            label_size, size = head.tolist()
            if label_size == FAILED:
                raise TandemError("the senders could not gather these weights, and gave them up")
            if label_size == END:
                return
            label = torch.empty(label_size, dtype=torch.uint8)
            circle.broadcast(label, 0)
            data = self._received.memory(size)
            for piece in data.split(piece_bytes) if size else ():
                circle.broadcast(piece, 0)
            self._received.update(Bucket(_checked(places_of(bytes(label.numpy())), size), data))
            position += 1


def _checked(places: tuple[Place, ...], size: int) -> tuple[Place, ...]:
    """Return the places, all of which lie within ``size`` bytes."""
    for place in places:
        if place.offset < 0 or place.offset + math.prod(place.shape) * place.dtype.itemsize > size:
            raise BrokenCircleError(f"weight {place.name!r} lies outside of its bucket of {size} bytes")
    return places
