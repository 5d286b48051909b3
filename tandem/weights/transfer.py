"""Work for one receiver in a thread of its own, so that one that hangs keeps nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_TICK_S = 1.0  # between looks at work that is still being prepared


class Transfer(Generic[T]):
    """``work``, started at once after ``prepare``; its result or its error is kept. ``name`` is the thread's.

    It has ``seconds`` of time, in which preparation doesn't count: whatever that waits for has a limit of its own.
    """

    def __init__(
        self, name: str, work: Callable[[], T], seconds: float = float("inf"), prepare: Callable[[], None] | None = None
    ) -> None:
        self.name = name
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._seconds, self._prepare = seconds, prepare
        self._begun: float | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> bool:
        """Whether the transfer is neither done nor failed."""
        return self._thread.is_alive()

    @property
    def late(self) -> bool:
        """Whether the transfer is under way and its time is over."""
        return self.under_way and self._left() == 0.0

    @property
    def error(self) -> BaseException | None:
        """What the work or its preparation raised, if it did."""
        return self._error

    def join(self) -> None:
        """Wait for the end, as long as it has time."""
        while self.under_way and not self.late:
            self._thread.join(min(self._left(), _TICK_S))

    def check(self) -> None:
        """Raise its error, if it has failed."""
        if self._error is not None:
            raise self._error

    def result(self) -> T:
        """Wait for the result. Raises the error of the work."""
        self._thread.join()
        self.check()
        return self._results[0]

    def _run(self, work: Callable[[], T]) -> None:
        try:
            if self._prepare is not None:
                self._prepare()
            self._begun = time.monotonic()
            self._results.append(work())
        except BaseException as error:  # raised to whoever asks
            self._error = error

    def _left(self) -> float:
        return self._seconds if self._begun is None else max(0.0, self._begun + self._seconds - time.monotonic())
