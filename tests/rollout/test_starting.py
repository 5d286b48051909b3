"""An engine that starts is told apart from one that doesn't answer: a limit of its own, and signs of life."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

from tandem.base.errors import EngineHungError
from tandem.rollout.connection import Connection, Patience
from tandem.rollout.process import HostedEngine
from tandem.rollout.wire import Message


class SlowHost:
    """A process that says what it is told to, and answers every question."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.channel, self.pid, self.killed = self, 7, False

    def send(self, kind: str, tensors: Any = None, file: Any = None, **fields: Any) -> None:
        if fields["number"] >= 0:
            self.said.put(Message("answer", {"number": fields["number"], "version": 0}, {}))

    def receive(self) -> Message | None:
        return self.said.get()

    def ending(self) -> str:
        return "has ended"

    def kill(self) -> None:
        self.killed = True
        self.said.put(None)

    def close(self) -> None:
        self.said.put(None)


def test_what_is_told_of_a_start() -> None:
    host = SlowHost()
    link = Connection("rollout-0", host, Patience(300.0, 1.0, 1.0))
    assert link.starting == "is starting, for 0 s of at most 300 s, no sign of life yet"
    host.said.put(Message("beat", {"steps": None}, {}))
    while "no sign" in link.starting:
        time.sleep(0.01)
    assert link.starting == "is starting, for 0 s of at most 300 s, its last sign of life 0 s ago"
    host.said.put(Message("ready", {"version": 0}, {}))
    link.wait_until_ready()
    assert link.starting == ""
    link.close()


def test_a_start_that_takes_longer_than_an_answer_may_is_waited_for() -> None:
    host = SlowHost()
    engine = HostedEngine("rollout-0", host, 0, Patience(start_s=60.0, deadline_s=0.1, silence_s=60.0))
    assert not engine.is_ready()
    time.sleep(0.3)  # longer than deadline_s
    host.said.put(Message("ready", {"version": 0}, {}))
    engine.wait_until_ready()
    assert engine.ping(5.0) == 0 and not host.killed
    engine.close()


def test_a_start_has_a_limit_too() -> None:
    host = SlowHost()
    engine = HostedEngine("rollout-0", host, 0, Patience(start_s=0.1, deadline_s=60.0, silence_s=60.0))
    with pytest.raises(EngineHungError, match=r"did not give its start in 0.1 s"):
        engine.wait_until_ready()
    assert host.killed and engine.starting == ""
    engine.close()
