"""A rank that is gone, fails or hangs is named by its role, whichever role that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tandem.base.errors import DeadlineError, DiedError, WriteError
from tandem.roles.rank_calls import Call, Done, Reply
from tandem.roles.train_group import RankError, TrainGroup
from tandem.roles.train_rank import TrainRank

ROLES = ["actor", "critic", "reference", "actor_fwd", "teacher org/large"]


class Never:
    """A reply that doesn't come."""

    def result(self, timeout: float | None = None) -> Any:
        raise TimeoutError


class Raises:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self, timeout: float | None = None) -> Any:
        raise self._error


class FakeRank:
    """A rank that answers a call with what ``answer`` gives."""

    def __init__(self, name: str, answer: Callable[[], Reply[Any]]) -> None:
        self.name, self._answer = name, answer

    def submit(self, call: Call[Any, Any]) -> Any:
        return self._answer()

    def check(self) -> None:
        """It lives."""

    def silent_s(self) -> float:
        """Its process has stopped where its answer never comes."""
        return 5.0 if self._answer is Never else 0.0


def group_of(role: str, *answers: Callable[[], Reply[Any]]) -> TrainGroup:
    ranks = [FakeRank(f"rank {number} of the {role} (pid {number})", answer) for number, answer in enumerate(answers)]
    return TrainGroup(ranks, deadline_s=0.3, role=role)


@pytest.mark.parametrize("role", ROLES)
def test_a_rank_that_hangs_is_named(role: str) -> None:
    with pytest.raises(DeadlineError) as raised:
        group_of(role, lambda: Done(1), Never).call(TrainRank.wake)
    assert f"wake on 2 ranks of the {role}" in str(raised.value)
    assert f"blocked by rank 1 of the {role} (pid 1)" in str(raised.value)


@pytest.mark.parametrize("role", ROLES)
def test_a_rank_that_is_stopped_is_told_before_the_deadline(role: str, caplog: pytest.LogCaptureFixture) -> None:
    ranks = [FakeRank(f"rank {n} of the {role}", a) for n, a in enumerate([lambda: Done(1), Never])]
    with pytest.raises(DeadlineError):
        TrainGroup(ranks, deadline_s=1.5, warning_s=0.2, role=role).call(TrainRank.wake)
    told = f"rank 1 of the {role} gives no sign of life"
    assert any("wake stalled for" in line and told in line for line in caplog.messages)


@pytest.mark.parametrize("role", ROLES)
def test_a_rank_that_fails_is_named_and_so_is_its_group_afterwards(role: str) -> None:
    group = group_of(role, lambda: Done(1), lambda: Raises(RuntimeError("no memory")))
    with pytest.raises(RankError, match=f"wake failed on rank 1 of the {role} .*no memory"):
        group.call(TrainRank.wake)
    with pytest.raises(RankError, match=f"the ranks of the {role} can't go on after an error"):
        group.call(TrainRank.wake)


def test_a_rank_that_died_says_so_itself() -> None:
    died = DiedError("rank 1 of the critic died while it was needed for the answer to forward()")
    with pytest.raises(DiedError, match="rank 1 of the critic died"):
        group_of("critic", lambda: Done(1), lambda: Raises(died)).call(TrainRank.wake)


def test_a_disk_without_room_leaves_the_ranks_where_they_are() -> None:
    """All ranks agree on it at one meeting, so the model can still be exported to another place."""
    replies: list[Reply[Any]] = [Raises(WriteError("full")), Raises(WriteError("full")), Done(1), Done(1)]
    group = group_of("actor", lambda: replies.pop(0), lambda: replies.pop(0))
    with pytest.raises(WriteError, match="full"):
        group.call(TrainRank.wake)
    assert group.call(TrainRank.status) == 1
