"""The sender's end: its part of a snapshot, kept as it was, and sent to whoever comes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

import torch

from tandem.base.errors import ContractError, DeadlineError, TandemError
from tandem.models.fingerprint import fingerprint
from tandem.transport.buckets import Bucket, pack, pieces
from tandem.transport.circle import Circle, Circles, Meeting

END, FAILED = 0, -1
"""In place of the bytes of a label: there is no further bucket; there will be none, since gathering has failed."""

MOST_SENDERS = 8
"""Ranks that keep and send a part. Each has a group of its own with all receivers."""


def sender_name(index: int) -> str:
    """Return what the circle around this sender is called."""
    return f"sender {index}"


class Outbox:
    """A part of the newest snapshot: every bucket whose position leaves the remainder ``index`` by ``senders``.

    One thread ``open``s a snapshot, ``fill``s it as it is gathered, and ``end``s it; others ``send`` it at the
    same time, and wait for what isn't there yet. It stays until the next is opened.
    """

    def __init__(self, index: int, senders: int, device: torch.device) -> None:
        self._index, self._senders = index, senders
        self._news = threading.Condition()
        self._number: int | None = None
        self._buckets: list[Bucket] = []
        self._seen = 0  # buckets of all senders
        self._ended = self._failed = False
        self._fingerprint: str | None = None
        self._spare: list[Bucket] = []
        self._circles = Circles(device)

    def open(self, number: int) -> None:
        """Begin the snapshot ``number``, in the memory of the one before."""
        with self._news:
            self._number, self._seen, self._fingerprint = number, 0, None
            self._ended = self._failed = False
            self._spare, self._buckets = self._buckets, []

    def fill(self, pairs: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> None:
        """Keep this sender's buckets of all ``pairs``, which every sender is given in the same order.

        Those of the others are let go, one tensor after the other.
        """
        bucket: list[tuple[str, torch.Tensor]] = []
        count = size = 0
        for name, tensor in pairs:
            count, size = count + 1, size + tensor.nbytes
            if self.takes_next:
                bucket.append((name, tensor))
            if size >= bucket_bytes:
                self._add(bucket)
                bucket, count, size = [], 0, 0
        if count:
            self._add(bucket)

    def _add(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Keep the next bucket, if it is this sender's, and count it."""
        if self.takes_next:
            old = self._spare[len(self._buckets)].data if len(self._spare) > len(self._buckets) else None
            bucket = pack(pairs, old)
        with self._news:
            if self.takes_next:
                self._buckets.append(bucket)
            self._seen += 1
            self._news.notify_all()

    @property
    def takes_next(self) -> bool:
        """Whether the next bucket is this sender's."""
        return self._seen % self._senders == self._index

    def end(self, *, failed: bool = False) -> None:
        """Say that there is no further bucket; ``failed``: what was to come won't."""
        with self._news:
            self._ended, self._failed = True, failed
            self._news.notify_all()

    def fail(self) -> None:
        """Say that what is not there yet won't come."""
        if not self._ended:
            self.end(failed=True)

    def buckets(self, number: int, seconds: float) -> Iterator[Bucket]:
        """Yield this sender's buckets of the snapshot, as they come."""
        for i in range(2**31):
            with self._news:
                self._require(number)
                if not self._news.wait_for(lambda i=i: len(self._buckets) > i or self._ended, seconds):  # type: ignore[misc]
                    raise DeadlineError(f"waited {seconds:g} s for bucket {i} of snapshot {number} of the weights")
                self._require(number)
                if len(self._buckets) <= i:
                    return
                bucket = self._buckets[i]
            yield bucket

    def fingerprint(self, number: int, seconds: float) -> tuple[str, int]:
        """Return the fingerprint of this sender's part of the snapshot and its bytes, once it is complete."""
        parts = list(self.buckets(number, seconds))
        if self._failed:
            raise TandemError(f"snapshot {number} of the weights could not be gathered")
        if self._fingerprint is None:
            self._fingerprint = fingerprint(pair for bucket in parts for pair in bucket.pairs())
        nbytes = sum(tensor.nbytes for bucket in parts for _, tensor in bucket.pairs())
        return self._fingerprint, nbytes

    def send(self, meeting: Meeting, number: int, piece_bytes: int) -> None:
        """Send this sender's buckets of the snapshot to all other members of the meeting, as they come.

        Raises ``BrokenCircleError`` where a member is gone.
        """
        try:
            circle = self._circles.enter(meeting, 0, sender_name(self._index))
            for bucket in self.buckets(number, meeting.seconds):
                label = bucket.label()
                self._head(circle, len(label), bucket.data.numel())
                circle.broadcast(torch.frombuffer(bytearray(label), dtype=torch.uint8), 0)
                for piece in pieces(bucket.data, piece_bytes):
                    circle.broadcast(piece, 0)
            if self._failed or self.takes_next:
                self._head(circle, FAILED if self._failed else END, 0)
        except BaseException:
            self.give_up(meeting.key)
            raise

    def give_up(self, key: str) -> None:
        """End what is sent in the group ``key``, in any thread; it is not used again."""
        self._circles.give_up(key)

    def _head(self, circle: Circle, label: int, data: int) -> None:
        circle.broadcast(torch.tensor([label, data], dtype=torch.int64), 0)

    def _require(self, number: int) -> None:
        if self._number != number:
            raise ContractError(f"snapshot {number} of the weights is not kept any more: {self._number} is")
