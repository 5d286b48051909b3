"""A server of interpreters that have imported what Tandem imports: each request forks one, which runs as a new one.

Started as ``python -P -m tests.warm.server SOCKET OWNER``. It only imports, runs nothing, and has one thread: so each
fork begins as an interpreter does that has just imported the same. It ends with its owner.

A request is a message of JSON with the files of the new process: ``words`` after ``python`` on its command line, its
``folder``, its ``environment``, ``files`` (the numbers that it knows them by), ``session`` (whether it leads one of its
own) and ``adopted`` (whether it is to be a child of the owner, who adopts orphans meanwhile, or stays one of the
server). The answer, from the new process itself, is its id.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import types
from contextlib import suppress
from typing import Any

IMPORTED = (
    "torch.distributed.fsdp",
    "transformers.models.qwen2.modeling_qwen2",
    "tandem.cli.app",
    "tandem.control.entry",
    "tandem.rollout.host",
    "tandem.reward.process.worker",
)
"""What processes of tests spend their first seconds on."""

LONGEST = 1 << 17
"""Bytes of a request: command line and environment."""

_MOST_FILES, _ABOVE, _LOOK_S = 32, 500, 1.0


def serve(path: str, owner: int) -> dict[str, Any] | None:
    """Answer requests until the owner is gone. Returns in each process that is forked, with its request."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a keyboard it is for the owner
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen()
    listening.settimeout(_LOOK_S)
    print("ready", flush=True)
    while os.getppid() == owner:
        with suppress(TimeoutError):
            asking, _ = listening.accept()
            asking.setblocking(True)
            message, files, _, _ = socket.recv_fds(asking, LONGEST, _MOST_FILES)
            request = json.loads(message)
            if _fork(owner if request["adopted"] else None):
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                if request["session"]:
                    os.setsid()
                asking.send(str(os.getpid()).encode())
                asking.close()
                _place(dict(zip(request["files"], files, strict=True)))
                return dict(request)
            asking.close()
            for file in files:
                os.close(file)
    return None


def _fork(parent: int | None) -> bool:
    """Return whether this is the new process: a child of this one, or as soon as ``parent`` has adopted it."""
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    if os.fork():
        return False
    if parent is not None:
        if os.fork():
            os._exit(0)
        while os.getppid() != parent:
            os.sched_yield()
    return True


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _place(files: dict[int, int]) -> None:
    """Give each file the number that it is to have; numbers above all of them are free meanwhile."""
    above = {number: fcntl.fcntl(file, fcntl.F_DUPFD, _ABOVE) for number, file in files.items()}
    for file in files.values():
        os.close(file)
    for number, file in above.items():
        os.dup2(file, number)
        os.close(file)


def run(request: dict[str, Any], base: list[str]) -> None:
    """Run the words as ``python`` would: ``[-P] -m MODULE``, ``[-P] -c CODE`` or a script, with their arguments."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    words = list(request["words"])
    beside = [os.getcwd()] if words[0] == "-m" else [""]
    if words[0] == "-P":
        beside = []
        del words[0]
    if words[0] not in ("-m", "-c"):
        beside = [os.path.dirname(os.path.realpath(words[0]))]
    sys.path[:] = [*beside, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *base]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [folder for folder in sys.path if folder not in own]
    if (found := serve(sys.argv[1], int(sys.argv[2]))) is not None:
        run(found, others)
