"""Runs a Python program of unknown origin in a process that can reach nothing and is over in time.

``isolation`` says what the kernel refuses to the program:

- ``full``: the network, other processes (to make, to signal, to look into), its limits and the machine's settings
  (seccomp), and every file but Python's own and its empty folder (Landlock). Linux 5.13 or newer, x86_64 or aarch64.
- ``network``: the same without Landlock, so it reads and writes what the user can.
- ``limits``: neither. Only time, memory and size are limited: for programs that are trusted.

In all three: an empty environment, an empty folder that is deleted afterwards, limits on processor time, memory, open
files and file size, a wall-clock limit, and a limit on output.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tandem.base.errors import RewardError

Isolation = Literal["full", "network", "limits"]
Kind = Literal["stdin", "call", "assert"]
_INSIDE = Path(__file__).with_name("sandbox_inside.py")
_FILE_BYTES = 1 << 20
_OPEN_FILES = 64
_CHUNK = 1 << 16
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}
_START_S = 10.0  # for the sandbox's own test, on a busy machine
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
"""
_ESCAPES = ("import socket; socket.socket()", "import os; os.fork()", "open('/proc/self/status')")
"""Ways out that must be closed: by seccomp the first two, by Landlock the last."""
_ESCAPE = """
try:
    {way}
except OSError:
    pass
else:
    print("{way} was not refused")
    raise SystemExit(1)
"""


class Ending(StrEnum):
    """How a program ended."""

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
    """Limits of every program: ``seconds`` of wall clock, ``memory_mb`` of address space, ``output_kb`` of output."""

    isolation: Isolation = "full"
    seconds: float = 5.0
    memory_mb: int = 512
    output_kb: int = 1024

    def check(self) -> None:
        """Run a program that tries to get out. Raises ``RewardError`` if it does, or no door closes."""
        tries = _ESCAPES[: {"full": 3, "network": 2, "limits": 0}[self.isolation]]
        program = _GREEDY.format(memory=self.memory_mb << 20) + "".join(_ESCAPE.format(way=way) for way in tries)
        ended = self._run(
            "assert", program, {"call.json": json.dumps({"token": "held"})}, "", max(_START_S, self.seconds)
        )
        if ended.result == "held":
            return
        why = (
            ended.result.removeprefix(CLOSED) or ended.output.strip()[-300:] or f"a program that it runs {ended.ending}"
        )
        raise RewardError(
            f"no sandbox with isolation {self.isolation!r} on this machine: {why}. Write isolation: network (no "
            "Landlock needed) or limits (no protection, for programs that you trust)"
        )

    def run(self, program: str, stdin: str, seconds: float | None = None) -> Ended:
        """The program as a script that reads ``stdin``."""
        return self._run("stdin", program, {}, stdin, seconds)

    def call(self, program: str, function: str, arguments: list[Any], seconds: float | None = None) -> Ended:
        """What the program defines, then a call of its ``function``, or of that method of its class ``Solution``.

        ``result`` is the value as JSON, empty if there is none.
        """
        call = json.dumps({"function": function, "arguments": arguments})
        return self._run("call", program, {"call.json": call}, "", seconds)

    def passes(self, program: str, tests: str, seconds: float | None = None) -> bool:
        """Whether ``tests``, Python code that runs after the program and sees its names, run to their end."""
        token = secrets.token_hex(16)
        files = {"tests.py": tests, "call.json": json.dumps({"token": token})}
        return self._run("assert", program, files, "", seconds).result == token

    def _run(self, kind: Kind, program: str, files: Mapping[str, str], stdin: str, seconds: float | None) -> Ended:
        folder = Path(tempfile.mkdtemp(prefix="tandem-program-"))
        try:
            texts = {"program.py": program, "tests.py": "", "call.json": "{}", "stdin": stdin, **files}
            for name, text in texts.items():
                (folder / name).write_bytes(text.encode("utf-8", "replace"))
            return self._watch(kind, folder, self.seconds if seconds is None else seconds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _watch(self, kind: Kind, folder: Path, seconds: float) -> Ended:
        """Start the program and read what it says until it ends, or must be ended."""
        read, write = os.pipe()
        limits = [math.ceil(seconds) + 1, self.memory_mb << 20, _FILE_BYTES, _OPEN_FILES]
        order = [kind, self.isolation, limits, _readable(folder), str(folder), write, os.getpid()]
        command = [sys.executable, "-s", "-S", "-P", "-B", str(_INSIDE), json.dumps(order)]
        deadline = time.monotonic() + seconds
        try:
            with open(folder / "stdin", "rb") as given:
                os.unlink(folder / "stdin")
                child = subprocess.Popen(
                    command,
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env=_ENVIRONMENT,
                    pass_fds=[write],
                    start_new_session=True,
                )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        assert child.stdout is not None
        with child.stdout, open(read, "rb", buffering=0) as result:
            said = _read([child.stdout.fileno(), result.fileno()], deadline, self.output_kb << 10)
            status = _end(child, deadline if said.ending is Ending.DONE else 0.0)
        ending = said.ending
        if ending is Ending.DONE and status != 0:
            ending = Ending.LATE if status in (None, -signal.SIGXCPU) else Ending.FAILED
        return Ended(ending, *(text.decode("utf-8", "replace") for text in said.texts))


class _Said(NamedTuple):
    ending: Ending
    texts: list[bytes]


def _read(sources: list[int], deadline: float, most: int) -> _Said:
    """All that the sources say until they close; ``DONE`` unless that takes too long or is above ``most`` bytes."""
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


def _end(child: subprocess.Popen[bytes], deadline: float) -> int | None:
    """End the program and what it started; its status if it ended by itself."""
    status: int | None = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = child.wait(max(0.0, deadline - time.monotonic()))
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in the group
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    return status


def _readable(folder: Path) -> list[str]:
    """Python's own library, the system's, and the program's folder."""
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.join(sys.base_prefix, "lib")}
    return [*sorted(own), *_LIBRARIES, *_DEVICES, str(folder)]
