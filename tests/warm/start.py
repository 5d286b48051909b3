"""Python processes of tests that start in a moment, forked from a server that has imported everything.

A test that asks for the fixture ``warm_python`` and what it tests start such processes wherever they start this
interpreter. Tests of what is imported, or of how a process starts, must not.
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

ROOT = Path(__file__).parents[2]
_READ_AT_IMPORT = ("OMP_", "MKL_", "ATEN_", "HF_", "TORCH", "TRANSFORMERS_", "TOKENIZERS_", "CUDA_", "LD_", "PYTHON")
_READ_LATER = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
_FLAGS = ("-m", "-c", "-P")
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
ONE_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
_ADOPTING = threading.Lock()


class Server:
    """The server of this process. It starts with the first that wants it, and ends with this process."""

    def __init__(self) -> None:
        self.environment = read_at_import(os.environ)
        self._folder = tempfile.mkdtemp(prefix="warm-")
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        self.path = os.path.join(self._folder, "s")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.warm.server", self.path, str(os.getpid())],
            env=os.environ | {"PYTHONPATH": str(ROOT), **ONE_THREAD}, cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=None,
        )  # fmt: skip
        assert self._process.stdout is not None and self._process.stdout.readline() == b"ready\n"
        atexit.register(self._process.kill)

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
    """Let the processes become children of this one whose parent, a descendant of this one, ends meanwhile."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_ADOPT, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(_ADOPT, 0, 0, 0, 0)


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that packages read when they are imported, which the server has done."""
    names = [name for name in environment if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER]
    return {name: environment[name] for name in names}


class WarmPopen(subprocess.Popen[Any]):
    """A process of this interpreter comes from the server, unless its environment wants other imports."""

    def _execute_child(  # type: ignore[misc]
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any, env: Any, *rest: Any
    ) -> None:
        startupinfo, flags, shell, *pipes = rest[:9]
        *_, session, group = rest
        environment = dict(os.environ if env is None else env)
        if (
            isinstance(args, str | bytes | os.PathLike)
            or args[0] != sys.executable
            or (args[1].startswith("-") and args[1] not in _FLAGS)
            or preexec_fn is not None
            or group != -1
            or read_at_import(environment) != server().environment
        ):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
            return
        given = [own if pipe == -1 else pipe for own, pipe in zip((0, 1, 2), (pipes[0], pipes[3], pipes[5]), strict=True)]
        request = {
            "words": [str(word) for word in args[1:]],
            "folder": os.getcwd() if cwd is None else str(cwd),
            "environment": environment,
            "files": [0, 1, 2, *pass_fds],
            "session": session,
        }
        self.pid = server().fork(request, [*given, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

@contextmanager
def warm_workers() -> Iterator[None]:
    """Let the workers of a Ray cluster that is started inside come from the server; it must outlive the cluster."""
    program, python = Path(server().path).with_name("python"), sys.executable
    program.write_text(
        f'#!/bin/sh\nexec {python} -I -S {Path(__file__).with_name("ray_worker.py")} {server().path} {python} "$@"\n'
    )
    program.chmod(0o755)
    sys.executable = str(program)
    try:
        yield
    finally:
        sys.executable = python
