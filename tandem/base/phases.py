"""What this process is doing at this moment, and how far it is, for whoever shows it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class Phase:
    """Something that takes a while: ``done`` of ``total`` pieces (None: how many there will be isn't known)."""

    name: str
    total: int | None = None
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    in_main: bool = field(default_factory=lambda: threading.current_thread() is threading.main_thread())

    def advance(self, pieces: int = 1) -> None:
        """Count pieces that are done."""
        self.done += pieces


_open: list[Phase] = []
_lock = threading.Lock()


@contextmanager
def phase(name: str, total: int | None = None) -> Iterator[Phase]:
    """Do something that is shown as ``name`` while it lasts; phases may nest, and go on in several threads."""
    own = Phase(name, total)
    with _lock:
        _open.append(own)
    try:
        yield own
    finally:
        with _lock:
            _open.remove(own)


def current() -> Phase | None:
    """Return the innermost phase of the main thread, or of another one where that has none."""
    with _lock:
        inner = [one for one in _open if one.in_main] or _open
        counted = [one for one in inner if one.total is not None or one.done]
        return (counted or inner)[-1] if inner else None
