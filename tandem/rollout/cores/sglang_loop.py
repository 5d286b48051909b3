"""SGLang's scheduler in a thread of this process: its own event loop, which stands wherever it looks for requests."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any


class SchedulerLoop:
    """The scheduler that ``start`` makes. It waits for orders at each turn of its loop, and makes one turn a ``step``.

    Everything of SGLang's runs in one thread: CUDA's current stream and OpenMP's pool belong to a thread. What is
    raised there, by ``start`` too, is raised to whoever waits; what ends the loop, to everyone who comes after.
    """

    def __init__(self, start: Callable[[], Any]) -> None:
        self._orders: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._going: list[Any] = []  # requests for the next turn
        self._outputs: list[Any] = []
        self._end: BaseException | None = None  # what ended the loop
        threading.Thread(target=self._run, args=(start,), name="sglang", daemon=True).start()
        self.scheduler: Any = self._answer()
        self._answer()  # it stands

    def call(self, work: Callable[[], Any]) -> Any:
        """Do this in the thread of the scheduler, between two turns."""
        return self._order(work)

    def step(self, requests: Sequence[Any]) -> list[Any]:
        """Give these requests and make a turn; return what the scheduler has sent in it."""
        self._going = list(requests)
        outputs: list[Any] = self._order(None)
        return outputs

    def _order(self, work: Callable[[], Any] | None) -> Any:
        """Hand an order to the loop and wait for its answer; None is the order to go on."""
        if self._end is not None:
            raise self._end
        self._orders.put(work)
        return self._answer()

    def _answer(self) -> Any:
        answer, error = self._answers.get()
        if error is not None:
            raise error
        return answer

    def _run(self, start: Callable[[], Any]) -> None:
        try:
            scheduler = start()
            scheduler.request_receiver = self
            scheduler.output_streamer.send_to_detokenizer = self
            scheduler.ipc_channels = dataclasses.replace(scheduler.ipc_channels, send_to_tokenizer=self)
            self._answers.put((scheduler, None))
            scheduler.run_event_loop()
            raise RuntimeError("SGLang's event loop has ended by itself")
        except BaseException as error:  # raised to whoever waits
            self._end = error
            self._answers.put((None, error))

    # --- what the scheduler calls ------------------------------------------------------------------------------------

    def recv_requests(self, local_reqs: Sequence[Any] | None = None) -> list[Any]:
        """Carry out orders, now that a turn has ended, until the next is wanted; return the requests that have come."""
        outputs, self._outputs = self._outputs, []
        self._answers.put((outputs, None))
        while (work := self._orders.get()) is not None:
            try:
                self._answers.put((work(), None))
            except BaseException as error:  # raised to whoever gave the order
                self._answers.put((None, error))
        return [*(local_reqs or ()), *self._going]

    def send_output(self, output: Any, request: Any = None) -> None:
        """Keep what would go to SGLang's other processes."""
        del request
        self._outputs.append(output)
