"""A line that is redrawn in the output of a notebook's cell, by IPython's own display."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

from rich.text import Text


class CellLine:
    """Shows what ``draw`` gives in one place of the cell that runs, anew every ``every_s`` seconds.

    ``transient``: nothing is left of it at its end, else the last state.
    """

    def __init__(self, draw: Callable[[], Text], *, every_s: float = 0.5, transient: bool = False) -> None:
        self._draw, self._every_s, self._transient = draw, every_s, transient
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="notebook line", daemon=True)
        self._handle: Any = None

    def start(self) -> None:
        """Begin to show it. Raises ``ImportError`` where there is no IPython."""
        display = importlib.import_module("IPython.display").display
        self._handle = display(self._bundle(), raw=True, display_id=True)
        self._thread.start()

    def stop(self) -> None:
        """Show the last state, or take the line away."""
        self._over.set()
        self._thread.join()
        self._handle.update({"text/plain": ""} if self._transient else self._bundle(), raw=True)

    def _redraw(self) -> None:
        while not self._over.wait(self._every_s):
            self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        return {"text/plain": self._draw().plain}
