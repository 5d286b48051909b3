"""What the ``hf`` engine decodes together."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tandem.models.causal_lm import CausalLM
from tandem.models.kv_cost import Rows
from tandem.models.layouts.kv_store import KVPool
from tandem.models.layouts.row_cache import RowCache
from tandem.rollout.block import Block, asked
from tandem.rollout.kv_room import KVRoom
from tandem.rollout.protocol import GroupOutput, GroupRequest, Sampling


class RunningBatch:
    """All rows in flight: one block that groups share, or, if ``exact``, one block per group.

    A group that has a block to itself is computed from nothing but its own tokens, in shapes that depend on nothing
    else: its tokens are bit-equal whatever else is in flight.

    Groups begin only where ``memory`` has room for them at their longest, in tables of ``pool`` where they stand in
    some, so that what is in flight never has to make room.
    """

    def __init__(
        self,
        model: CausalLM,
        sampling: Sampling,
        limit: int,
        cache: RowCache | None,
        memory: KVRoom,
        pool: KVPool,
    ) -> None:
        self._model, self._sampling = model, sampling
        self._limit = limit
        self._memory, self._pool = memory, pool
        memory.hold(self, [])
        self._exact = cache is None
        self.cache = cache
        self._asked: dict[Block, Rows] = {}  # of blocks that have one group
        self._blocks = [] if cache is None else [Block(model, sampling, cache, limit)]

    @property
    def count(self) -> int:
        """The number of rows in flight."""
        return sum(block.count for block in self._blocks)

    @property
    def room(self) -> int:
        """Groups that can start now."""
        if self._exact:
            return self._limit // self._sampling.samples - len(self._blocks)
        return self._blocks[0].room

    def fits(self, requests: Sequence[GroupRequest]) -> bool:
        """Say whether there is memory for these prompts and their samples, beside what is in flight.

        Raises ``ContractError`` for one that has none when it is alone.
        """
        more = [asked(request, self._sampling) for request in requests]
        for request, rows in zip(requests, more, strict=True):
            self._memory.check(request.key, rows)
        return self._memory.fits(self, self._flying(), more)

    def _flying(self) -> list[Rows]:
        if self._exact:  # a block has its memory for as long as it lasts
            return [self._asked[block] for block in self._blocks]
        return self._blocks[0].flying()

    def admit(self, requests: list[GroupRequest], version: int) -> None:
        """Prefill these prompts and draw the first token of each sample."""
        more = [asked(request, self._sampling) for request in requests]
        self._memory.hold(self, [*self._flying(), *more])
        if not self._exact:
            self._blocks[0].admit(requests, version)
            return
        for request, rows in zip(requests, more, strict=True):
            n = self._sampling.samples
            width = rows.answer + (0 if rows.shared else rows.prompt)
            block = Block(self._model, self._sampling, self._model.new_cache(n, width, self._pool), n)
            block.admit([request], version)
            self._blocks.append(block)
            self._asked[block] = rows

    def step(self, version: int) -> None:
        """Draw one more token for every row, with weights ``version``."""
        for block in self._blocks:
            if block.count:
                block.step(version)

    def abort(self, keys: Collection[int | str] | None = None) -> list[GroupOutput]:
        """End everything in flight as it is, or the groups with these ``keys``."""
        for block in self._blocks:
            block.abort(keys)
        return self.take_finished()

    @property
    def ended(self) -> bool:
        """A group has ended since the last ``take_finished``."""
        return any(block.finished for block in self._blocks)

    def take_finished(self) -> list[GroupOutput]:
        """Return the groups that have ended since the last call."""
        finished = [group for block in self._blocks for group in block.finished]
        for block in self._blocks:
            block.finished.clear()
        if self._exact:
            self._blocks = [block for block in self._blocks if block.count]
            self._asked = {block: self._asked[block] for block in self._blocks}
        self._memory.hold(self, self._flying())
        return finished

    def close(self) -> None:
        """Give up the room of what is in flight, whoever may still know of this object."""
        for block in self._blocks:
            block.forget()
        self._memory.release(self)
