"""What the ``hf`` engine decodes together."""

from __future__ import annotations

from tandem.models.causal_lm import CausalLM
from tandem.models.layouts.row_cache import RowCache
from tandem.rollout.block import Block
from tandem.rollout.protocol import GroupOutput, GroupRequest, Sampling


class RunningBatch:
    """All rows in flight: one block that groups share, or, if ``exact``, one block per group.

    A group that has a block to itself is computed from nothing but its own tokens, in shapes that depend on nothing
    else: its tokens are bit-equal whatever else is in flight.
    """

    def __init__(self, model: CausalLM, sampling: Sampling, limit: int, cache: RowCache | None) -> None:
        self._model, self._sampling = model, sampling
        self._limit = limit
        self._exact = cache is None
        self.cache = cache
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

    def admit(self, requests: list[GroupRequest], version: int) -> None:
        """Prefill these prompts and draw the first token of each sample."""
        if not self._exact:
            self._blocks[0].admit(requests, version)
            return
        for request in requests:
            n = self._sampling.samples
            cache = self._model.new_cache(n, len(request.prompt_ids) + request.limit(self._sampling))
            block = Block(self._model, self._sampling, cache, n)
            block.admit([request], version)
            self._blocks.append(block)

    def step(self, version: int) -> None:
        """Draw one more token for every row, with weights ``version``."""
        for block in self._blocks:
            if block.count:
                block.step(version)

    def abort(self) -> list[GroupOutput]:
        """End everything in flight as it is."""
        for block in self._blocks:
            block.abort()
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
        return finished

    def close(self) -> None:
        """Do nothing: what is in flight goes with this object."""
