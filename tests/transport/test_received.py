"""Begin, update, finish, abort, take, in any order: a snapshot that is not there as a whole is never given out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.base.errors import ContractError
from tandem.transport.buckets import Bucket, pack
from tandem.transport.inbox import ReceivedSnapshots


class Receiving(RuleBasedStateMachine):
    """The model: what was finished with how many buckets, and what an engine has taken."""

    def __init__(self) -> None:
        super().__init__()
        self.received = ReceivedSnapshots()
        self.whole: dict[int, int] = {}
        self.under_way: list[int] | None = None  # the values that came
        self.number = 0
        self.serving: list[torch.Tensor] = []
        self.served = -1

    @precondition(lambda self: self.under_way is None)
    @rule(again=st.booleans())
    def begin(self, again: bool) -> None:
        if not (again and self.whole and self.number not in (self.served,)):
            self.number += 1
        self.received.begin(self.number)
        self.whole.pop(self.number, None)
        self.under_way = []

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def a_second_may_not_begin(self) -> None:
        with pytest.raises(ContractError, match="is under way"):
            self.received.begin(self.number + 1)

    @precondition(lambda self: self.under_way is not None)
    @rule(value=st.integers(0, 255), size=st.integers(1, 3))
    def update(self, value: int, size: int) -> None:
        assert self.under_way is not None
        bucket = pack([(f"w{len(self.under_way)}", torch.full((size * 64,), self.number % 256, dtype=torch.uint8))])
        memory = self.received.memory(bucket.data.numel())
        self.received.update(Bucket(bucket.places, memory.copy_(bucket.data)))
        self.under_way.append(value)

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def finish(self) -> None:
        assert self.under_way is not None
        self.received.finish()
        self.whole[self.number], self.under_way = len(self.under_way), None

    @rule()
    def abort(self) -> None:
        self.received.abort()
        self.under_way = None

    @precondition(lambda self: self.under_way is None)
    @rule()
    def nothing_to_finish_or_update(self) -> None:
        for call in (self.received.finish, lambda: self.received.update(pack([]))):
            with pytest.raises(ContractError, match=r"under way|begin comes first"):
                call()

    @precondition(lambda self: self.received.finished)
    @rule()
    def take_the_newest(self) -> None:
        newest = self.received.finished[-1]
        pairs = dict(self.received.take(newest))
        assert len(pairs) == self.whole[newest]
        self.serving, self.served = list(pairs.values()), newest

    @rule(distance=st.integers(1, 3))
    def what_is_not_whole_is_refused(self, distance: int) -> None:
        with pytest.raises(ContractError, match="did not arrive here as a whole"):
            self.received.take(self.number + distance)
        if self.under_way is not None:
            with pytest.raises(ContractError, match="did not arrive here as a whole"):
                self.received.take(self.number)

    @invariant()
    def what_serves_is_never_written_to(self) -> None:
        assert all(bool((tensor == self.served % 256).all()) for tensor in self.serving)

    @invariant()
    def few_are_kept(self) -> None:
        assert len(self.received.finished) <= 3
        assert set(self.received.finished) <= set(self.whole)


Receiving.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestReceived = Receiving.TestCase
