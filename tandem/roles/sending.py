"""The train ranks as those who broadcast weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tandem.roles.train_group import TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.train.protocol import Exported
from tandem.transport.circle import Meeting
from tandem.transport.outbox import MOST_SENDERS
from tandem.weights.transfer import Transfer


class SendingRanks:
    """``Senders`` over the first ranks of a group; what is sent is ``part``, in buckets of ``bucket_bytes``."""

    def __init__(
        self, ranks: TrainGroup[TrainRank], bucket_bytes: int, deadline_s: float, part: Exported = "merged"
    ) -> None:
        self._ranks, self._bucket_bytes, self._deadline_s, self._part = ranks, bucket_bytes, deadline_s, part

    def __len__(self) -> int:
        return min(len(self._ranks), MOST_SENDERS)

    def name_of(self, index: int) -> str:
        """Say which rank it is."""
        return self._ranks.name_of(index)

    def open(self, number: int) -> None:
        """Begin a snapshot on all ranks."""
        self._ranks.call(TrainRank.open_outbox, number, len(self), self._part)

    def gather(self, number: int) -> None:
        """Have all ranks gather; those that failed or were not asked tell their receivers."""
        try:
            self._ranks.call(TrainRank.fill_outbox, self._bucket_bytes)
        except BaseException:
            for rank in range(len(self)):  # the dead among them don't answer
                Transfer(f"close-{rank}", lambda rank=rank: self._ranks.aside(rank, TrainRank.close_outbox))  # type: ignore[misc]
            raise

    def send(self, index: int, meeting: Meeting, number: int, piece_bytes: int) -> None:
        """Have the rank send its part."""
        self._ranks.aside(index, TrainRank.send_outbox, meeting, number, piece_bytes)

    def give_up(self, index: int, key: str) -> None:
        """Have the rank end what it sends in the group ``key``."""
        self._ranks.aside(index, TrainRank.give_up_outbox, key)

    def parts(self, number: int) -> Sequence[tuple[str, int]]:
        """Return fingerprint and bytes by rank."""
        asked = [
            Transfer(f"part-{i}", lambda i=i: self._ranks.aside(i, TrainRank.outbox_part, number, self._deadline_s))  # type: ignore[misc]
            for i in range(len(self))
        ]
        return [one.result() for one in asked]

    def pairs(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what the only rank keeps, which is in this process."""
        assert len(self) == 1
        return self._ranks.aside(0, TrainRank.outbox_pairs, number, self._deadline_s)
