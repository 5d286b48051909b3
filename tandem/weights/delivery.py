"""Work for one receiver in a thread of its own, so that one that hangs keeps nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Delivery(Generic[T]):
    """``work``, started at once; its result or its error is kept. ``name`` is the thread's."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> bool:
        """Neither done nor failed."""
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait for the end, at most so long."""
        self._thread.join(seconds)

    def check(self) -> None:
        """Raise its error, if it has failed."""
        if self._error is not None:
            raise self._error

    def result(self) -> T:
        """The result; waits for it. Raises the error of the work."""
        self._thread.join()
        self.check()
        return self._results[0]

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._results.append(work())
        except BaseException as error:  # raised to whoever asks
            self._error = error
