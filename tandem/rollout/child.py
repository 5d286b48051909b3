"""The process of a rollout engine as its owner sees it: started, listened to, ended with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path

from tandem.base.device_kinds import shown_alone
from tandem.rollout.interpreter import USERS_LAST, folders_of_the_user
from tandem.rollout.spec import EngineSpec
from tandem.rollout.wire import Channel

_LINES = 20  # of standard error that are remembered
_SEND_S = 30  # a process that takes nothing for so long is stopped, not slow
_ENDING_S = 2.0  # for a process that is ending to do so by itself
_HOST = "tandem.rollout.host"

# This package for an interpreter that doesn't find it, and whose own packages must not be hidden by ours.
_ELSEWHERE = f"""{USERS_LAST}
import importlib.util, runpy
folder = sys.argv.pop(1)
found = importlib.util.spec_from_file_location("tandem", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["tandem"] = importlib.util.module_from_spec(found)
found.loader.exec_module(sys.modules["tandem"])
runpy.run_module("{_HOST}", run_name="__main__", alter_sys=True)
"""


class HostProcess:
    """A child in a process group of its own, which runs ``tandem.rollout.host``; the user's script is not run again.

    With ``spec.python`` it is of another environment: it has the packages of that, this ``tandem``, and the folders of
    the user's own modules. Of GPUs it sees that of ``spec.device`` alone. What it writes to standard output or error
    appears on this process's standard error.
    """

    def __init__(self, spec: EngineSpec) -> None:
        ours, theirs = socket.socketpair()
        device, shown = shown_alone(spec.device, os.environ)
        threads = {} if spec.threads is None else {"OMP_NUM_THREADS": str(spec.threads)}
        folders = [folder or os.getcwd() for folder in sys.path]
        program = [sys.executable, "-P", "-m", _HOST]
        if spec.python is not None:
            folders = folders_of_the_user()
            program = [spec.python, "-P", "-c", _ELSEWHERE, str(Path(__file__).parents[1])]
        with theirs:
            self._child = subprocess.Popen(
                [*program, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | threads | shown,
            )
        self.channel = Channel(ours, _SEND_S)
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._copying = threading.Thread(target=self._copy, name=f"stderr-of-{self.pid}", daemon=True)
        self._copying.start()
        with contextlib.suppress(OSError):  # one that is gone already is found to be so by whoever listens
            self.channel.send("setup", **replace(spec, device=device).to_json())

    @property
    def pid(self) -> int:
        """The process id of the child, which leads its process group."""
        return self._child.pid

    def ending(self) -> str:
        """Return how it ended and what it wrote last. Ends it, if it doesn't end by itself within a moment."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_ENDING_S)
        code = self.kill()
        end = f"exited with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        self._copying.join(_ENDING_S)
        lines = "".join(self._lines).rstrip()
        return f"{end}; its last lines:\n{lines}" if lines else f"{end} without a word"

    def kill(self) -> int:
        """End it and what it started at once, if it hasn't ended; its exit code, negative for a signal."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in the group
            os.killpg(self.pid, signal.SIGKILL)
        return self._child.wait()

    def _copy(self) -> None:
        assert self._child.stderr is not None
        for line in self._child.stderr:
            self._lines.append(line)
            with contextlib.suppress(OSError, ValueError):  # ours may be closed
                sys.stderr.write(line)
