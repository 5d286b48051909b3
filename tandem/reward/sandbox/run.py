"""Runs a Python program of unknown origin in a process that can reach nothing and is over in time.

``isolation`` says what the kernel refuses to the program:

- ``full``: every system call but those of ``calls`` (seccomp), so the network, other processes and what they
  share, its limits and the machine's settings; every capability; and every file but Python's own, its empty folder and
  its temporary files (Landlock). Linux 5.13 or newer, x86_64 or aarch64. Around that stand namespaces of its own, or
  bubblewrap, where the machine has them (``walls``); only there is a place for temporary files.
- ``network``: the same without Landlock, so it reads and writes what the user can.
- ``limits``: none of these. Only time, memory and size are limited: for programs that are trusted.

In all three: an empty environment, an empty folder that is deleted afterwards, limits on processor time, memory, open
files and file size, a wall-clock limit, and a limit on output.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from tandem.base.errors import RewardError
from tandem.reward.sandbox.calls import call_filter
from tandem.reward.sandbox.walls import NO_WALLS, TEMPORARY_BYTES, Paths, Walls, candidates, make_paths
from tandem.reward.temporary import PROGRAM, TemporaryPlace

Isolation = Literal["full", "network", "limits"]
_PYTHON = os.path.realpath(sys.executable)  # a virtual environment's configuration can't be read from the inside
_INSIDE = Path(__file__).with_name("inside.py")
_FILE_BYTES = 1 << 20
_OPEN_FILES = 64
_CHUNK = 1 << 16
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",  # each thread of a numerical library would take memory
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_START_S = 10.0  # for the sandbox's own test, on a busy machine
_LEAVE_S = 1.0  # for walls to notice that what was within them has ended
_LATE = (None, -signal.SIGXCPU, 128 + signal.SIGXCPU)  # of the program itself, or as its walls report it
_HELD = "held"
CLOSED = "closed: "
"""Begins what the inside says where the doors can't be closed."""

_GREEDY = """
try:
    bytearray({memory})
except MemoryError:
    pass
else:
    print("memory has no limit")
    raise SystemExit(1)

def called(result):
    if result < 0:
        raise OSError
"""
_ESCAPES = (
    "import socket; socket.socket()",
    "import os; os.fork()",
    "import ctypes; called(ctypes.CDLL(None).personality(0xFFFFFFFF))",
    "import ctypes; called(ctypes.CDLL(None).prctl(23, 0, 0, 0, 0))",
    "import fcntl; fcntl.ioctl(0, 0x80086601, bytes(8))",
    "open('/proc/self/status')",
)
"""Ways out that must be closed: by the list of system calls, and the last by Landlock. Open ones do no harm."""
_ESCAPE = """
try:
    {way}
except OSError:
    pass
else:
    print({way!r} + " was not refused")
    raise SystemExit(1)
"""


class Ending(StrEnum):
    """The ways in which a program can end."""

    DONE = "done"  # by itself, with status 0
    FAILED = "failed"  # by an exception, a signal or another status
    LATE = "late"
    FLOODED = "flooded"  # with more output than is read


@dataclass(frozen=True)
class Ended:
    """A program's end, its standard output, and what the sandbox's own code said (empty unless it got there)."""

    ending: Ending
    output: str
    result: str


@dataclass(frozen=True)
class Sandbox:
    """Limits of every program: ``seconds`` of wall clock, ``memory_mb`` of address space, ``output_kb`` of output.

    ``packages`` are names of installed packages that a program may import besides Python's own library.
    """

    isolation: Isolation = "full"
    seconds: float = 5.0
    memory_mb: int = 512
    output_kb: int = 1024
    packages: tuple[str, ...] = ()

    def check(self) -> None:
        """Run a program that tries to get out. Raises ``RewardError`` if it does, or no door closes."""
        tries = _ESCAPES[: {"full": len(_ESCAPES), "network": len(_ESCAPES) - 1, "limits": 0}[self.isolation]]
        program = _GREEDY.format(memory=self.memory_mb << 20) + "".join(_ESCAPE.format(way=way) for way in tries)
        ended = self._held(_walls(self.isolation), program + "".join(f"\nimport {name}" for name in self.packages))
        if ended.result == _HELD:
            return
        why = (
            ended.result.removeprefix(CLOSED) or ended.output.strip()[-300:] or f"a program that it runs {ended.ending}"
        )
        raise RewardError(
            f"no sandbox with isolation {self.isolation!r} on this machine: {why}. Write isolation: network (no "
            "Landlock needed) or limits (no protection, for programs that you trust)"
        )

    def run(self, program: str, stdin: str, seconds: float | None = None) -> Ended:
        """Return the program as a script that reads ``stdin``."""
        return self._run({"kind": "stdin", "program": program}, stdin, seconds)

    def call(self, program: str, function: str, arguments: list[Any], seconds: float | None = None) -> Ended:
        """Return what the program defines, then a call of its ``function``, or of that method of its class
        ``Solution``.

        ``result`` is the value as JSON, empty if there is none.
        """
        task = {"kind": "call", "program": program, "function": function, "arguments": arguments}
        return self._run(task, "", seconds)

    def passes(self, program: str, tests: str, seconds: float | None = None) -> bool:
        """Return whether ``tests``, Python code that runs after the program and sees its names, run to their end."""
        token = secrets.token_hex(16)
        task = {"kind": "assert", "program": program, "tests": tests, "token": token}
        return self._run(task, "", seconds).result == token

    def _held(self, walls: Walls, program: str = "") -> Ended:
        """Return a program of the sandbox's own within ``walls``; the result is ``_HELD`` if it comes to its end."""
        task = {"kind": "assert", "program": program, "tests": "", "token": _HELD}
        return self._within(walls, task, "", max(_START_S, self.seconds))

    def _run(self, task: Mapping[str, Any], stdin: str, seconds: float | None) -> Ended:
        return self._within(_walls(self.isolation), task, stdin, self.seconds if seconds is None else seconds)

    def _within(self, walls: Walls, task: Mapping[str, Any], stdin: str, seconds: float) -> Ended:
        """Start the program and read what it says until it ends, or must be ended."""
        place = TemporaryPlace(PROGRAM)
        folder = place.path
        try:
            paths = make_paths(folder, [_PYTHON, str(_INSIDE)], self.packages)
            task = {**task, "search": paths.search}
            read, write = os.pipe()
            with open(read, "rb", buffering=0) as result, open(write, "wb", buffering=0) as said:
                order = json.dumps([task, self._doors(paths, walls, seconds), said.fileno()])
                with _unnamed(folder, order) as ordered, _unnamed(folder, stdin) as given:
                    child = self._start(paths, walls, ordered, given, said)
                said.close()
                return self._watch(child, result, walls, seconds)
        finally:
            place.remove()

    def _doors(self, paths: Paths, walls: Walls, seconds: float) -> dict[str, Any]:
        """Return what the inside closes, as its ``Doors``."""
        filtered = None if self.isolation == "limits" else call_filter(platform.machine())
        if filtered is None and self.isolation != "limits":
            raise RewardError(
                f"no sandbox on this machine: there is no table of system calls for {platform.machine()}. Write "
                "isolation: limits (no protection, for programs that you trust)"
            )
        return {
            "isolation": self.isolation,
            "limits": [math.ceil(seconds) + 1, self.memory_mb << 20, _FILE_BYTES, _OPEN_FILES],
            "calls": filtered,
            "readable": paths.readable,
            "listed": paths.search,
            "temporary": str(paths.temporary) if walls.stand else "",
            "temporary_bytes": TEMPORARY_BYTES,
            "namespaces": walls.namespaces,
            "parent": os.getpid() if walls.bubblewrap is None else 0,
        }

    def _start(
        self, paths: Paths, walls: Walls, ordered: IO[bytes], given: IO[bytes], said: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        command = [_PYTHON, "-s", "-S", "-P", "-B", str(_INSIDE), str(ordered.fileno())]
        return subprocess.Popen(
            walls.command(command, paths, files=self.isolation == "full"),
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=paths.work,
            env=_ENVIRONMENT | {"TMPDIR": str(paths.temporary)},
            pass_fds=[ordered.fileno(), said.fileno()],
            start_new_session=True,
        )

    def _watch(self, child: subprocess.Popen[bytes], result: IO[bytes], walls: Walls, seconds: float) -> Ended:
        deadline = time.monotonic() + seconds
        assert child.stdout is not None
        with child.stdout as output:
            said = _read([output.fileno(), result.fileno()], deadline, self.output_kb << 10)
            status = _end(child, deadline if said.ending is Ending.DONE else 0.0, walls)
        ending = said.ending
        if ending is Ending.DONE and status != 0:
            ending = Ending.LATE if status in _LATE else Ending.FAILED
        return Ended(ending, *(text.decode("utf-8", "replace") for text in said.texts))


@functools.cache
def _walls(isolation: Isolation) -> Walls:
    """Return the best walls that stand on this machine; found by a try, once."""
    if isolation == "limits":
        return NO_WALLS
    tried = Sandbox(isolation)
    return next((walls for walls in candidates() if walls.stand and tried._held(walls).result == _HELD), NO_WALLS)


def _unnamed(folder: Path, text: str) -> IO[bytes]:
    """Return a file that holds ``text``, open for reading only, and has no name any more."""
    path = folder / "unnamed"
    path.write_bytes(text.encode("utf-8", "replace"))
    file = open(path, "rb")  # noqa: SIM115  (the caller closes it)
    path.unlink()
    return file


class _Said(NamedTuple):
    ending: Ending
    texts: list[bytes]


def _read(sources: list[int], deadline: float, most: int) -> _Said:
    """Read all that the sources say until they close; ``DONE`` unless that takes too long or is above ``most``
    bytes.
    """
    texts = {source: bytearray() for source in sources}
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            found = selector.select(left) if left > 0 else []
            if not found:
                return _Said(Ending.LATE, [bytes(text) for text in texts.values()])
            for key, _ in found:
                piece = os.read(key.fd, _CHUNK)
                texts[key.fd] += piece
                if not piece:
                    selector.unregister(key.fd)
                if len(texts[key.fd]) > most:
                    return _Said(Ending.FLOODED, [bytes(text[:most]) for text in texts.values()])
    return _Said(Ending.DONE, [bytes(text) for text in texts.values()])


def _end(child: subprocess.Popen[bytes], deadline: float, walls: Walls) -> int | None:
    """End the program and what it started; its status if it ended by itself."""
    status: int | None = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = child.wait(max(0.0, deadline - time.monotonic()))
    if status is None and walls.stand:
        # What is within ends first, so that the walls reap it: else each late program would leave a process that only
        # the machine's first process can reap, and in a container that may be one that never does.
        for process in _children(child.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_LEAVE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in the group
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    return status


def _children(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:  # it has ended, or the kernel doesn't say
        return []
