"""One scoring process as the pool sees it: started, spoken to, killed with everything that it started."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.reward.process.wire import Inbox, Setup, send
from tandem.reward.temporary import SCORER, TemporaryPlace

if TYPE_CHECKING:
    from tandem.reward.process.job import Job

_SEND_S = 30.0  # a process that takes nothing for so long is stopped, not slow


class ForeignProcess:
    """A child that runs ``module`` on code of the user's, in a process group and with a temporary folder of its own.

    ``path`` is its ``sys.path`` and ``first`` the first message to it. ``since`` is when it began with what it does.
    """

    def __init__(self, module: str, path: Sequence[str], first: bytes) -> None:
        self._place = TemporaryPlace(SCORER)
        self.channel, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-P",
                "-m",
                module,
                str(theirs.fileno()),
                str(os.getpid()),
            ]
            self._child = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "TMPDIR": str(self._place.path)},
            )
        self.channel.settimeout(_SEND_S)
        self.inbox = Inbox(self.channel)
        self.ready = False
        self.since = time.monotonic()
        self.send(first)

    @property
    def pid(self) -> int:
        """The process id of the child, which leads its process group."""
        return self._child.pid

    def send(self, message: bytes) -> None:
        """Send, if the process still listens; that it doesn't is seen when its end of the socket is found closed."""
        try:
            send(self.channel, message)
        except OSError:
            self.inbox.closed = True

    def kill(self) -> str:
        """End the process and its children at once; how it ended: ``was killed by SIGSEGV``, ``exited with status 3``.

        One that is ending by itself has a moment to do so, that its own way of ending can be seen.
        """
        if self.inbox.closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(1.0)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in the group
            os.killpg(self.pid, signal.SIGKILL)
        code = self._child.wait()
        self.channel.close()
        self._place.remove()
        return f"exited with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


class ScoringProcess(ForeignProcess):
    """A child that scores. ``jobs`` is the message that it works on and ``answered`` the numbers of the jobs done.

    ``since`` is its start, that of the message, or (jobs in turn) of the current job.
    """

    def __init__(self, setup: Setup) -> None:
        self.jobs: list[Job] = []
        self.answered: set[int] = set()
        super().__init__("tandem.reward.process.worker", setup.path, pickle.dumps(setup))

    @property
    def idle(self) -> bool:
        """Whether the process is ready and has no work."""
        return self.ready and not self.jobs

    @property
    def activity(self) -> str:
        """What the process does now, in words."""
        if not self.ready:
            return "starts"
        return "scores " + ", ".join(job.name for job in self.unanswered[:1])

    def assign(self, jobs: list[Job]) -> None:
        """Give an idle process its next message."""
        self.jobs, self.answered, self.since = jobs, set(), time.monotonic()
        self.send(pickle.dumps([job.payload for job in jobs]))

    def answer(self, job: int) -> Job:
        """Return the job of that number, which is done now."""
        done = self.jobs[job]
        self.answered.add(job)
        self.since = time.monotonic()
        if len(self.answered) == len(self.jobs):
            self.jobs = []
        return done

    @property
    def unanswered(self) -> list[Job]:
        """What is left of the message, in its order."""
        return [job for i, job in enumerate(self.jobs) if i not in self.answered]
