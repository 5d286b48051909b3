"""The line to an engine's actor: how long an actor may take is not its to say, and nothing that comes late is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tandem.base.errors import EngineDiedError, EngineHungError
from tandem.remote.payload import pack
from tandem.rollout.connection import Connection, Patience
from tandem.runtime.ray.engine import ActorHost, OwnerLine


class FakeReply:
    """Looks that find no answer, then what is said."""

    def __init__(self, looks: int, said: Callable[[], Any]) -> None:
        self.looks, self.said = looks, said

    def result(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "waits without an end"
        if self.looks > 0:
            self.looks -= 1
            raise TimeoutError
        return self.said()


class FakeRemote:
    """An actor that answers each call in turn."""

    def __init__(self, *replies: FakeReply) -> None:
        self.replies, self.asked = list(replies), 0

    def submit(self, method: str, *args: Any, **options: Any) -> FakeReply:
        self.asked += method == "collect"
        return self.replies.pop(0)

    def kill(self) -> None:
        """Nothing is there to be ended."""


def says(*kinds: str) -> Callable[[], Any]:
    return lambda: [(kind, {}, pack({})) for kind in kinds]


def dies() -> Any:
    raise EngineDiedError("rollout engine 'rollout-0' died")


def test_what_an_actor_says_late_is_heard_once_and_in_order() -> None:
    remote = FakeRemote(FakeReply(20, says("beat", "ready")), FakeReply(3, dies))
    line = OwnerLine(remote)  # type: ignore[arg-type]
    received = [line.receive() for _ in range(3)]
    assert [message and message.kind for message in received] == ["beat", "ready", None]
    assert remote.asked == 2 and line.death == "rollout engine 'rollout-0' died"


class NeverThere(ActorHost):
    """An actor that the cluster has not begun to start."""

    def __init__(self) -> None:
        nothing = FakeReply(10**9, says())
        self._remote = FakeRemote(nothing)  # type: ignore[assignment]
        self._started = nothing  # type: ignore[assignment]
        self.channel = SilentLine()  # type: ignore[assignment]


class SilentLine:
    """Nobody is at the other end yet."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def receive(self) -> None:
        self._closed.wait()

    def close(self) -> None:
        self._closed.set()


def test_a_start_that_does_not_begin_ends_at_its_own_limit() -> None:
    link = Connection("rollout-0", NeverThere(), Patience(0.1, 60.0, 60.0))
    with pytest.raises(EngineHungError, match=r"^rollout engine 'rollout-0' did not give its start in 0.1 s"):
        link.wait_until_ready()
