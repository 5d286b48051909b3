"""Processes that are forked from a server that has imported everything and computed nothing.

A process that runs tests can't be forked itself: once it has done a backward pass with a device beside the CPU in
place, torch refuses every backward pass in its children.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle

_IMPORTED = ["tests.train.conftest", "tests.roles.rank_processes", "transformers.models.llama", "hypothesis"]


def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


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
