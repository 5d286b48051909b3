"""Waits of the actor's loop that take long are told while they last."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def telling(every_s: float, place: str, cause: Callable[[], str]) -> Iterator[Callable[[], str]]:
    """Around a wait: after each ``every_s`` seconds of it a warning says where the loop stands and why.

    Gives what says so at once. ``cause`` is called in a thread of its own.
    """
    started, over = time.monotonic(), threading.Event()

    def told() -> str:
        return f"{place} stalled for {time.monotonic() - started:.0f} seconds: {cause()}"

    def tell() -> None:
        while not over.wait(every_s):
            logger.warning(told())

    thread = threading.Thread(target=tell, name="stall-warning", daemon=True)
    thread.start()
    try:
        yield told
    finally:
        over.set()
