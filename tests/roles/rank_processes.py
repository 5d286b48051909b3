"""Ranks of the actor in forked processes that meet over gloo, behind ``RankHandle``."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tandem.base.errors import DiedError
from tandem.roles.rank_calls import Call
from tandem.roles.train_group import TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.train.engine import FsdpEngine
from tests import forked

Build = Callable[[DeviceMesh | None], FsdpEngine]
MEETING_S = 30
"""After this gloo gives a meeting up."""


class PipeReply:
    """The answer to one call through a pipe."""

    def __init__(self, rank: ProcessRank) -> None:
        self._rank = rank
        self.answer: tuple[bool, Any] | None = None

    def result(self, timeout: float | None = None) -> Any:
        if self.answer is None:
            self._rank.receive(self, timeout)
        assert self.answer is not None
        succeeded, value = self.answer
        if succeeded:
            return value
        raise value


class ProcessRank:
    """One rank and its process. Answers come in the order of the calls."""

    def __init__(self, number: int, process: BaseProcess, pipe: Connection) -> None:
        self.name, self.process = f"rank {number} (pid {process.pid})", process
        self._pipe = pipe
        self._open: deque[PipeReply] = deque()
        self._lock = threading.Lock()

    def submit(self, call: Call[TrainRank, Any]) -> PipeReply:
        reply = PipeReply(self)
        self._open.append(reply)
        try:
            self._pipe.send_bytes(pickle.dumps(call))
        except OSError as error:
            raise DiedError(f"{self.name} is gone") from error
        return reply

    def receive(self, wanted: PipeReply, timeout: float | None) -> None:
        with self._lock:
            while wanted.answer is None:
                if not self._pipe.poll(timeout):
                    raise TimeoutError
                try:
                    self._open.popleft().answer = pickle.loads(self._pipe.recv_bytes())
                except (EOFError, OSError) as error:
                    raise DiedError(f"{self.name} is gone") from error

    def silent_s(self) -> float:
        """A process that is stopped gives no sign of life."""
        state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return 1.0 if state == "T" else 0.0

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def rank_processes(world: int, build: Build, folder: Path) -> Iterator[list[ProcessRank]]:
    """``world`` ranks over engines from ``build``; killed at the end."""
    ranks = []
    folder.mkdir(exist_ok=True)
    for number in range(world):
        ours, theirs = forked.pipe()
        process = forked.start(partial(_serve, build), number, world, str(folder), theirs)
        theirs.close()
        ranks.append(ProcessRank(number, process, ours))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join(10)


@contextmanager
def group_of(
    world: int, build: Build, folder: Path, *, deadline_s: float = 60.0, **options: Any
) -> Iterator[TrainGroup]:
    """A group over ``world`` processes; with 0 the one rank in this process."""
    if world == 0:
        yield TrainGroup.in_process(build(None), deadline_s=deadline_s)
        return
    with rank_processes(world, build, folder) as ranks:
        yield TrainGroup(ranks, deadline_s=deadline_s, **options)


def _serve(build: Build, number: int, world: int, folder: str, pipe: Connection) -> None:
    rendezvous, patience = f"file://{folder}/rendezvous", timedelta(seconds=MEETING_S)
    dist.init_process_group("gloo", rendezvous, patience, world_size=world, rank=number)
    rank = TrainRank(build(init_device_mesh("cpu", (world,))), number)
    while True:
        call: Call[TrainRank, Any] = pickle.loads(pipe.recv_bytes())
        try:
            answer = (True, call.on(rank))
        except Exception as error:
            answer = (False, error)
        pipe.send_bytes(pickle.dumps(answer))
