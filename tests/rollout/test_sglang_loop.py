"""What is done around SGLang's own loop, over a scheduler that has one like it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.rollout.cores.sglang_loop import SchedulerLoop


@dataclass(frozen=True)
class Channels:
    send_to_tokenizer: Any = None


class Echo:
    """Counts down each request it was given, one at a turn, and sends what is left; ``broken`` is its end."""

    def __init__(self) -> None:
        self.request_receiver: Any = None
        self.output_streamer = SimpleNamespace(send_to_detokenizer=None)
        self.ipc_channels = Channels()
        self.turns = 0
        self.going: list[int] = []

    def run_event_loop(self) -> None:
        while True:
            self.going += self.request_receiver.recv_requests(local_reqs=[])
            self.turns += 1
            if "broken" in self.going:
                raise ValueError("broken")
            self.going = [left - 1 for left in self.going if left > 1]
            self.output_streamer.send_to_detokenizer.send_output(list(self.going))


def test_a_turn_is_made_for_each_step_and_none_beside() -> None:
    loop = SchedulerLoop(Echo)
    assert loop.scheduler.turns == 0
    assert loop.step([3, 1]) == [[2]]
    assert loop.step([]) == [[1]]
    time.sleep(0.05)
    assert loop.call(lambda: loop.scheduler.turns) == 2
    assert loop.step([5]) == [[4]]


def test_what_is_sent_between_two_turns_comes_with_the_next() -> None:
    loop = SchedulerLoop(Echo)
    loop.call(lambda: loop.scheduler.ipc_channels.send_to_tokenizer.send_output("aborted", None))
    assert loop.step([2]) == ["aborted", [1]]


def test_an_order_that_fails_is_heard_of_and_the_loop_goes_on() -> None:
    loop = SchedulerLoop(Echo)
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 // 0)
    assert loop.step([2]) == [[1]]


def test_a_start_and_a_loop_that_fail_are_heard_of() -> None:
    def start() -> Any:
        raise OSError("no model")

    with pytest.raises(OSError, match="no model"):
        SchedulerLoop(start)
    loop = SchedulerLoop(Echo)
    for order in (lambda: loop.step(["broken"]), lambda: loop.step([]), lambda: loop.call(int)):
        with pytest.raises(ValueError, match="broken"):
            order()
