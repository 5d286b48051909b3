"""Process groups of their own, beside the default one of torch: who they are made of is written down, never global.

``torch.distributed`` has one default group a process, which here belongs to the train ranks. A broadcast to engines has
other members, which come and go, so its groups are built from a store and a backend, as ``torch.distributed`` builds
them inside, and the default group is never asked or touched.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # what torch.distributed exports; mypy can't see those
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from tandem.base.errors import TandemError

LOOPBACK = "127.0.0.1"
_LOOK_S = 0.0002  # between looks at an operation that has just begun, and later
_LATER_S = 0.005
_REACH_S = 30.0
_KEPT = 4  # meetings: with and without those that take some versions only
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class BrokenCircleError(TandemError):
    """A group can't go on: a member is gone or late, or somebody gave the transfer up. Whoever is at fault is found
    elsewhere.
    """


@dataclass(frozen=True)
class Meeting:
    """Where the members of a group find each other, and how they talk. ``seconds`` bounds each of their waits."""

    host: str
    port: int
    key: str
    size: int
    backend: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a message to another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Meeting:
        """Return the meeting that ``to_json`` was called on."""
        return cls(**fields)


def open_store(host: str, world: int | None, patience: timedelta) -> TCPStore:
    """Open where processes find each other, on a free port; on the loopback device alone if ``host`` is that."""
    options: dict[str, Any] = {"wait_for_workers": False}
    port = 0
    if host == LOOPBACK:  # TCPStore itself listens on all addresses
        listening = socket.create_server((host, 0))
        port = int(listening.getsockname()[1])
        options["master_listen_fd"] = listening.detach()
    return TCPStore(host, port, world, True, patience, **options)


class Circle:
    """The group of ``meeting`` around ``name``, of which this process is member ``index``; see ``join``."""

    def __init__(self, meeting: Meeting, index: int, name: str, device: torch.device) -> None:
        self._meeting, self._index, self._name, self._device = meeting, index, name, device
        self._given_up = threading.Event()
        self._group: Any = None

    def join(self) -> None:
        """Return once all members are there; at once after the first time.

        Raises ``BrokenCircleError`` where they don't come, and ``TandemError`` where the meeting can't be reached from
        here: that is no fault of another member's.
        """
        if self._group is not None:
            return
        meeting = self._meeting
        patience = timedelta(seconds=meeting.seconds)
        # It is there already, and others wait for this member. TCPStore takes the time that it has twice.
        reaching = timedelta(seconds=min(_REACH_S, meeting.seconds / 4))
        try:
            store = TCPStore(meeting.host, meeting.port, None, False, reaching, wait_for_workers=False)
        except RuntimeError as error:
            where = f"{meeting.host}:{meeting.port}"
            raise TandemError(
                f"can't reach {where}, where the members of a broadcast of weights meet: the "
                "process that drives the run listens there. Open the ports between these machines, or write "
                "execution.weight_sync.transport: shared_memory"
            ) from error
        store.set_timeout(patience)
        shared = PrefixStore(f"{meeting.key}/{self._name}", store)
        self._await_all(shared)
        try:
            self._group = _group(meeting, shared, self._index, self._device, patience)
        except RuntimeError as error:
            raise BrokenCircleError(f"the members of a broadcast of weights can't connect: {error}") from error

    def _await_all(self, store: PrefixStore) -> None:
        """Wait until every member has come. Looked at again and again, so that the wait can be given up."""
        store.set(f"here {self._index}", "")
        missing = [f"here {i}" for i in range(self._meeting.size)]
        deadline = time.monotonic() + self._meeting.seconds
        while missing:
            missing = [key for key in missing if not store.check([key])]
            if missing and (self._given_up.is_set() or time.monotonic() > deadline):
                raise BrokenCircleError(
                    f"{len(missing)} of {self._meeting.size} members of the broadcast around {self._name} did not come"
                )
            time.sleep(_LATER_S if missing else 0.0)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Send ``tensor`` (B,) of the host's memory from the member ``root`` to all, in place."""
        if tensor.numel() == 0:
            return
        if self._device.type == "cpu":
            self._do(tensor, root)
            return
        there = tensor.to(self._device)
        self._do(there, root)
        tensor.copy_(there)

    def give_up(self) -> None:
        """End the wait for an operation under way, and refuse all others, in any thread.

        The operation itself goes on in threads of torch's until it is late, and may still write into its memory. To
        destroy the group is to wait for them, so it is never destroyed.
        """
        if not self._given_up.is_set():
            self._given_up.set()
            if self._group is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def _do(self, tensor: torch.Tensor, root: int) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        deadline = time.monotonic() + self._meeting.seconds
        rest = _LOOK_S
        try:
            work = self._group.broadcast([tensor], options)
            while not work.is_completed():
                if self._given_up.is_set() or time.monotonic() > deadline:
                    raise BrokenCircleError(f"a broadcast of weights was given up ({self._meeting.key})")
                time.sleep(rest)
                rest = min(rest * 1.5, _LATER_S)
            work.wait()
        except RuntimeError as error:
            raise BrokenCircleError(f"a broadcast of weights broke: {str(error).splitlines()[0]}") from error
        except BrokenCircleError:
            self.give_up()
            raise


def _group(meeting: Meeting, store: PrefixStore, index: int, device: torch.device, patience: timedelta) -> Any:
    """Return a group of torch's that isn't registered anywhere."""
    if meeting.backend == "gloo":
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch has no other way to name a device
        options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(meeting.host))]
        options._timeout = patience
        return ProcessGroupGloo(store, index, meeting.size, options)
    if device.type != "cuda":
        raise TandemError(f"a broadcast over {meeting.backend} needs a GPU in every process, and one is on {device}")
    nccl: Any = dist.ProcessGroupNCCL  # only in builds of torch with CUDA
    settings = nccl.Options()
    settings._timeout = patience
    with _survivable(), torch.cuda.device(device):
        return nccl(store, index, meeting.size, settings)


@contextmanager
def _survivable() -> Any:
    """Let a group of NCCL that is made here be cleaned up after an error (2), and not end its process (torch's
    default, 3): an engine goes on with the weights that it has.
    """
    before = os.environ.get(_NCCL_ERRORS)
    os.environ[_NCCL_ERRORS] = "2"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NCCL_ERRORS]
        else:
            os.environ[_NCCL_ERRORS] = before


def _own_address(host: str) -> str:
    """Return the address under which this machine talks to ``host``: it may have several. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return str(probe.getsockname()[0])


class Circles:
    """The groups of one process, by key: each is made at its first use, and the oldest of several are let go."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._circles: dict[tuple[str, str], Circle] = {}
        self._given_up: set[str] = set()

    def enter(self, meeting: Meeting, index: int, name: str) -> Circle:
        """Return the circle around ``name``, all of whose members are there."""
        place = meeting.key, name
        with self._lock:
            if meeting.key in self._given_up:
                raise BrokenCircleError(f"the broadcast {meeting.key} was given up")
            circle = self._circles.pop(place, None) or Circle(meeting, index, name, self._device)
            self._circles[place] = circle  # the newest
            keys = list(dict.fromkeys(key for key, _ in self._circles))
            for old in [place for place in self._circles if place[0] in keys[:-_KEPT]]:
                del self._circles[old]
        circle.join()
        return circle

    def give_up(self, key: str) -> None:
        """End what is done in the groups of ``key``, in any thread; they are not used again."""
        with self._lock:
            self._given_up.add(key)
            gone = [self._circles.pop(place) for place in list(self._circles) if place[0] == key]
        for circle in gone:
            circle.give_up()
