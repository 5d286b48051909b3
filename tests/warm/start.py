"""Python processes of tests that start in a moment, forked from a server that has imported what they import.

Rollout engines start so in all tests. With the fixture ``warm_python`` a test, and what it tests, start such processes
wherever they would start this interpreter; with ``warm_workers`` a Ray cluster does. Tests of imports, or of how an
interpreter starts, do without.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

_ColdPopen = subprocess.Popen
_READ_AT_IMPORT = ("OMP_", "MKL_", "ATEN_", "HF_", "TORCH", "TRANSFORMERS_", "TOKENIZERS_", "CUDA_", "LD_", "PYTHON")
_READ_LATER = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONBREAKPOINT", "TORCHINDUCTOR_CACHE_DIR")
"""Ray sets the third, and torch, once it compiles, the last."""
_NO_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
_ADOPTING = threading.Lock()
_AT_FIRST: dict[str, str] = {}


def note_environment() -> None:
    """Note the environment of the server before any test changes it: the first that wants a process may do so."""
    _AT_FIRST.update(os.environ)


class Server:
    """The server of this process: it starts with the first process that is wanted, and ends with this one."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="warm-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.path = os.path.join(folder, "socket")
        self.environment = read_at_import(_AT_FIRST)
        self._process = _ColdPopen(
            [sys.executable, "-P", "-m", "tests.warm.server", self.path, str(os.getpid())],
            env=_AT_FIRST | {"PYTHONPATH": str(ROOT)} | _NO_THREAD,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        atexit.register(self._process.kill)
        assert self._process.stdout is not None and self._process.stdout.readline() == b"ready\n"

    def fork(self, request: Mapping[str, object], files: Sequence[int]) -> int:
        """Start a process, a child of this one; its id."""
        with _ADOPTING, adopting_orphans(), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.connect(self.path)
            socket.send_fds(asking, [json.dumps({**request, "adopted": True}).encode()], files)
            return int(asking.recv(64))


@cache
def server() -> Server:
    """Start the server of this process, if it hasn't one."""
    return Server()


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the parent of those whose own, a descendant of this one, ends meanwhile."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(_ADOPT, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(_ADOPT, 0, 0, 0, 0)


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that packages read when they are imported, which the server has done."""
    names = [name for name in environment if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER]
    return {name: environment[name] for name in names}


class WarmPopen(_ColdPopen[Any]):
    """A process of this interpreter comes from the server, unless it might import otherwise than that did."""

    def is_warm(self, words: list[str]) -> bool:
        """Return whether the server knows how to run these words after ``python``."""
        return bool(words) and (words[0] in ("-m", "-c", "-P") or not words[0].startswith("-"))

    def _execute_child(  # type: ignore[misc]
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *more: Any
    ) -> None:
        pipes, (session, group) = more[3:9], more[-2:]
        environment = dict(os.environ if env is None else env)
        words = [str(word) for word in args[1:]] if isinstance(args, list | tuple) and args[0] == sys.executable else []
        if not self.is_warm(words) or group != -1 or preexec_fn or read_at_import(environment) != server().environment:
            cold = super()._execute_child  # type: ignore[misc]
            cold(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)
            return
        stdin, _, _, stdout, _, stderr = pipes
        request = {
            "words": words,
            "folder": os.path.abspath(cwd or "."),
            "environment": environment,
            "files": [0, 1, 2, *pass_fds],
            "session": session,
        }
        own = [0 if stdin == -1 else stdin, 1 if stdout == -1 else stdout, 2 if stderr == -1 else stderr]
        self.pid = server().fork(request, [*own, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class WarmEngine(WarmPopen):
    """The process of a rollout engine comes from the server, and no other."""

    def is_warm(self, words: list[str]) -> bool:
        """Return whether the words start an engine."""
        return words[:3] == ["-P", "-m", "tandem.rollout.host"]


@pytest.fixture(scope="session", autouse=True)
def warm_engines() -> Iterator[None]:
    """Engines in processes of their own start in a moment, in all tests."""
    with _started_as(WarmEngine):
        yield


@pytest.fixture(scope="module")
def warm_python(warm_engines: None) -> Iterator[None]:
    """All processes of this interpreter start in a moment meanwhile."""
    with _started_as(WarmPopen):
        yield


@contextmanager
def _started_as(kind: type[WarmPopen]) -> Iterator[None]:
    """Start processes as ``kind``, where the system has what that needs."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr(subprocess, "Popen", kind)
        yield


@contextmanager
def warm_workers() -> Iterator[None]:
    """Let the workers of a Ray cluster that is started inside come from the server, and so end with this process.

    Where the system has not what that needs, they start as ever.
    """
    if sys.platform != "linux":
        yield
        return
    worker, program = Path(__file__).with_name("ray_worker.py"), Path(server().path).with_name("python")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {worker} {server().path} {sys.executable} "$@"\n')
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        yield
