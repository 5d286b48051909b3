"""One ``generate`` inside the process of an engine: its requests as they arrive, its groups as they finish."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any

from tandem.base.errors import TandemError
from tandem.rollout.protocol import GroupOutput, GroupRequest
from tandem.rollout.wire import Line, Message, pack_samples, unpack_request


class _CancelledError(Exception):
    """The owner doesn't want the rest."""


class RequestStream:
    """Asks for ``window`` requests whenever the engine looks for some and all that were asked for have come.

    So there wait no more of them here than an engine in the owner's own process would take ahead.
    """

    def __init__(self, number: int, channel: Line, window: int) -> None:
        self.cancelled = False
        self.over = threading.Event()
        self._number, self._channel, self._window = number, channel, window
        self._arrived: queue.SimpleQueue[GroupRequest | None] = queue.SimpleQueue()
        self._awaited = 0  # requests asked for that haven't come
        self._unanswered: set[int | str] = set()

    def hear(self, message: Message) -> None:
        """Note that a request has come, or that there will be none; ``cancel``: nor shall there be answers."""
        self.cancelled = self.cancelled or message.kind == "cancel"
        self._arrived.put(self._unpacked(message) if message.kind == "request" else None)

    def _unpacked(self, message: Message) -> GroupRequest:
        key = message.fields["key"]

        def report(sample: int, ids: Sequence[int], logprobs: Sequence[float]) -> None:
            with suppress(OSError):  # the owner is gone, which others find out
                drawn: dict[str, Any] = {"sample": sample, "ids": list(ids), "logprobs": list(logprobs)}
                self._channel.send("drawn", number=self._number, key=key, **drawn)

        return unpack_request(message, report)

    def requests(self) -> Iterator[GroupRequest | None]:
        """Yield what the engine pulls. It waits only while nothing is unanswered: then a request, or the end must
        come.
        """
        while True:
            if self.cancelled:
                raise _CancelledError
            if self._awaited == 0 and self._arrived.empty():
                self._awaited = self._window
                self._channel.send("want", number=self._number, count=self._window)
            try:
                request = self._arrived.get(block=not self._unanswered)
            except queue.Empty:
                yield None
                continue
            if self.cancelled:
                raise _CancelledError
            if request is None:
                return
            self._awaited -= 1
            self._unanswered.add(request.key)
            yield request

    def run(self, outputs: Iterator[GroupOutput]) -> None:
        """Send each group as it ends, then say how the whole ended."""
        try:
            for output in outputs:
                if self.cancelled:
                    return
                self._send(output)
        except _CancelledError:
            return
        except TandemError as error:
            self._channel.send("failed", number=self._number, error=type(error).__name__, text=str(error))
        else:
            self._channel.send("done", number=self._number)
        finally:
            if isinstance(outputs, Generator):  # else the engine would be at work until somebody forgets it
                outputs.close()
            self.over.set()

    def _send(self, output: GroupOutput) -> None:
        fields, tensors = pack_samples(output.samples)
        if output.prompt_routes is not None:
            tensors["prompt_routes"] = output.prompt_routes.contiguous()
        key = output.request.key
        self._unanswered.remove(key)
        self._channel.send("group", tensors, number=self._number, key=key, samples=fields)
