"""Processes that are forked from a server that has imported everything and computed nothing.

A process that runs tests can't be forked itself: once it has done a backward pass with a device beside the CPU in
place, torch refuses every backward pass in its children. The server itself is forked from that of `tests.warm`, which
has imported nearly all of the same.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle
import pytest

from tests.warm.start import WarmPopen

_ColdSpawn = util.spawnv_passfds
_SERVERS: list[WarmPopen] = []  # for ever: a Popen that is forgotten collects its process, whose end others ask about
_IMPORTED = [
    *("tests.train.conftest", "tests.roles.rank_processes", "transformers.models.llama", "hypothesis"),
    *("tools.families", "tools.image_shapes"),  # later the path of the tests may have another `tools` before these
]


def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    if sys.platform == "linux":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(util, "spawnv_passfds", _spawn)
            forkserver.ensure_running()
    return context


def _spawn(path: str, words: Sequence[str], files: Sequence[int]) -> int:
    """Start the server of forked processes from the warm one; whatever else is started beside it as ever."""
    if "forkserver" not in words[-1]:
        return _ColdSpawn(path, words, files)
    _SERVERS.append(WarmPopen([sys.executable, *words[-2:]], pass_fds=files))
    return _SERVERS[-1].pid


def pipe() -> tuple[Connection, Connection]:
    """Two ends; one of them may be an argument of a process."""
    return _server().Pipe()


def start(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Call ``function`` in a process of its own. It may be a closure: what it holds is copied."""
    process = _server().Process(target=_call, args=(cloudpickle.dumps(function), *arguments), daemon=True)
    process.start()
    return process


def _call(function: bytes, *arguments: Any) -> None:
    cloudpickle.loads(function)(*arguments)
