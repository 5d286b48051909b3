"""What ends a process of foreign code with its parent, whatever that code is doing."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import time

_WATCH_S = 0.5


class LastResort:
    """Ends this process unless it is put off in time; works even while a C call holds the interpreter."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115  (stays open: the timer writes a traceback there)
        self._armed = False

    def arm(self) -> None:
        """Start the timer. Not before the scorer is made: imports may take long."""
        self._armed = True
        self.put_off()

    def put_off(self) -> None:
        """Start the timer anew, if it runs."""
        if self._armed:
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._nowhere)


def end_with(parent: int, last_resort: LastResort) -> None:
    """Kill this process and what it started once the parent is gone, whatever its code is doing.

    Code inside one long C call (a regular expression, say) keeps this thread from running: hence the last resort.
    """
    while os.getppid() == parent:
        last_resort.put_off()
        time.sleep(_WATCH_S)
    clear()
    os.killpg(0, signal.SIGKILL)


def clear() -> None:
    """Remove this process's folder of temporary files, whose owner is gone and can't."""
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
