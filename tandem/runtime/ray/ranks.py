"""Train ranks in Ray actors: one process and one device each, one process group among them."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch._C._distributed_c10d import TCPStore  # what torch.distributed.TCPStore is; mypy can't see that one
from torch.distributed.device_mesh import DeviceMesh

from tandem.base.device_kinds import CPU, device_kind
from tandem.models.device import found_device
from tandem.models.numerics import prepare_process
from tandem.models.weights import copy_weights
from tandem.remote.calls import (
    START_SECONDS,
    Pulse,
    Remote,
    Reply,
    end_with_node,
    import_ray,
    name_in_cluster,
    work_beside,
)
from tandem.remote.payload import Packed, pack, unpack
from tandem.roles.rank_calls import Call, T
from tandem.roles.train_group import RankError, TrainGroup
from tandem.roles.train_rank import TagDevice, TrainRank
from tandem.runtime.ray.cluster import Slot
from tandem.runtime.ray.weights import BucketRefs, RemoteWeights, put_bucket
from tandem.train.packed_engine import PackedEngine
from tandem.train.protocol import Exported
from tandem.train.sharding import rank_mesh
from tandem.transport.circle import LOOPBACK, Meeting, open_store
from tandem.transport.inbox import Inbox

BuildEngine = Callable[[torch.device, DeviceMesh | None], PackedEngine]
"""Makes the engine of this rank on its device and the mesh of all ranks. Travels by name, so every worker must be able
to import it."""

ALIVE = "alive"
_ASIDE, _CALLS_ASIDE = "aside", 8
_MEETING_S = 1800.0


@dataclass(frozen=True)
class RankSetup:
    """What every rank is given. ``plugins`` are imported first; ``threads`` None: PyTorch's own choice.

    ``device``: what is wanted of ``Slot.device``. ``seed`` is the same for all, because what is made at random, such as
    adapters, must be equal on all ranks. ``meeting_s``: longest wait of one rank for another, and for the model of one
    to be loaded. ``folder``: where the driver works. ``tensor_parallel``: the ranks that are one model among them;
    ``sequence_parallel``: those that share their rows.
    """

    build: BuildEngine
    device: str
    seed: int
    plugins: tuple[str, ...] = ()
    threads: int | None = None
    exact: bool = False
    tag_device: TagDevice = "device"
    meeting_s: float = _MEETING_S
    folder: str = ""
    tensor_parallel: int = 1
    sequence_parallel: int = 1


class RayTrainRank(TrainRank):
    """A rank in an actor of Ray's, which also reads and writes Ray's shared memory.

    What only such a rank can do takes and gives references; Ray has to see them, so these calls travel as they are.
    """

    def put_bucket(self, max_bytes: int, dtype: torch.dtype | None) -> BucketRefs:
        """Put ``next_bucket`` into shared memory, floats as ``dtype``; [] at the end, and on ranks after the first."""
        bucket = self.next_bucket(max_bytes)
        cast = [(name, tensor.to(dtype) if tensor.is_floating_point() else tensor) for name, tensor in bucket]
        return put_bucket(bucket if dtype is None else cast)

    def take_weights(self, refs: BucketRefs) -> None:
        """Put other weights (see ``copy_weights``) in place of the model's, for a rank that only scores."""
        copy_weights(self.engine.model, RemoteWeights(refs))

    def receive(self, meeting: Meeting, index: int, senders: int, number: int, piece_bytes: int) -> None:
        """Keep a snapshot that is broadcast, beside other calls; see ``Inbox.receive``."""
        self._inbox.receive(meeting, index, senders, number, piece_bytes)

    def give_up(self, key: str) -> None:
        """End what is received in the groups of ``key``, beside other calls."""
        self._inbox.give_up(key)

    def take_received(self, number: int) -> None:
        """Put the snapshot in place of the model's weights, for a rank that only scores."""
        copy_weights(self.engine.model, self._inbox.take(number))

    @cached_property
    def _inbox(self) -> Inbox:
        return Inbox(self.engine.device)


class RankActor:
    """The process of one rank. Its ``RayTrainRank`` exists from ``build`` on."""

    def __init__(self, rank: int, world: int, role: str) -> None:
        end_with_node()
        self._rank, self._world, self._role = rank, world, role
        self._store: TCPStore | None = None
        self._hosted: RayTrainRank | None = None

    def open_meeting(self, seconds: float) -> tuple[str, int]:
        """Open where the ranks find each other, and hold it so that nobody else can take it; return address and
        port.
        """
        host = str(import_ray().util.get_node_ip_address())
        patience = timedelta(seconds=seconds)
        self._store = open_store(host, self._world, patience)
        return host, self._store.port

    def build(self, packed: Packed, meeting: tuple[str, int], device_name: str) -> int:
        """Meet the other ranks, if any, and make the engine on ``device_name``; the pid of this process."""
        setup: RankSetup = unpack(packed)
        work_beside(setup.folder)
        transformers.utils.logging.disable_progress_bar()
        prepare_process(threads=setup.threads, exact=setup.exact)
        for plugin in setup.plugins:
            importlib.import_module(plugin)
        torch.manual_seed(setup.seed)
        # Outputs of a sharded model are views of what it gathered; nothing here writes into them.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        # A tensor that is cut in two ways is put together in two steps; torch says that one would be faster.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        device = found_device(device_name)
        mesh = self._meet(setup, device, meeting) if self._world > 1 else None
        self._hosted = RayTrainRank(setup.build(device, mesh), self._rank, setup.tag_device)
        return os.getpid()

    def _meet(self, setup: RankSetup, device: torch.device, meeting: tuple[str, int]) -> DeviceMesh:
        patience = timedelta(seconds=setup.meeting_s)
        if self._store is None:
            self._store = TCPStore(*meeting, self._world, False, patience, wait_for_workers=False)
        networks = [name for _, name in socket.if_nameindex()]
        if meeting[0] == LOOPBACK and "lo" in networks:  # whatever the machine's name is, all ranks are on it
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        kind = device_kind(device.type)
        backend = "gloo" if kind is None else kind.collectives
        if device.type != CPU:
            torch.get_device_module(device.type).set_device(device)
        dist.init_process_group(backend, store=self._store, timeout=patience, rank=self._rank, world_size=self._world)
        return rank_mesh(device.type, self._world, setup.tensor_parallel, setup.sequence_parallel)

    def pid(self) -> int:
        """Return the id of this process: an answer shows that it lives."""
        return os.getpid()

    def call(self, packed: Packed) -> Packed:
        """Make a call of the rank that came packed, and pack its result."""
        call: Call[RayTrainRank, Any] = unpack(packed)
        return pack(call.on(self._there()))

    def call_aside(self, packed: Packed) -> Packed:
        """Do as ``call``, beside those that are under way."""
        return self.call(packed)

    def call_with_references(self, call: Call[RayTrainRank, T]) -> T:
        """Make a call of what only a ``RayTrainRank`` can do. Nothing is packed, so that Ray sees the references in
        its answer.
        """
        return call.on(self._there())

    def _there(self) -> RayTrainRank:
        if self._hosted is None:
            raise RankError(f"rank {self._rank} of the {self._role} has no engine: build() comes first")
        return self._hosted


@dataclass(frozen=True)
class _Unpacked:
    """The reply of a rank."""

    reply: Reply

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer and unpack it. Raises ``TimeoutError`` if it is not there in time."""
        return unpack(self.reply.result(timeout))


class RayRank:
    """A ``RankHandle`` over a rank in an actor."""

    def __init__(self, remote: Remote, pid: int) -> None:
        self.remote, self.pid = remote, pid
        self._pulse = Pulse(remote, ALIVE)

    @property
    def name(self) -> str:
        """Which rank, and its process."""
        return f"{self.remote.name} (pid {self.pid})"

    def submit(self, call: Call[RayTrainRank, T]) -> _Unpacked | Reply:
        """Send the call to the rank's actor; the reply is unpacked when it is asked for."""
        if not hasattr(TrainRank, call.name):
            return self.remote.submit("call_with_references", call, awaited="buckets of weights")
        return _Unpacked(self.remote.submit("call", pack(call), awaited=f"the answer to {call.name}()"))

    def aside(self, call: Call[RayTrainRank, T]) -> _Unpacked:
        """Send a call that is made beside those of ``submit``."""
        return _Unpacked(self.remote.submit("call_aside", pack(call), awaited=call.name, group=_ASIDE))

    def check(self) -> None:
        """Raise if the rank is gone. One question is open at most; a rank at work answers it later."""
        self._pulse.look()

    def silent_s(self) -> float:
        """Return the seconds since the last sign of life; a thread of its own gives it, whatever the rank is doing."""
        self._pulse.look()
        return self._pulse.silent_s

    def kill(self) -> None:
        """End the process of the rank at once."""
        self.remote.kill()


def start_ranks(slots: Sequence[Slot], setup: RankSetup, *, part: float = 1.0, role: str = "actor") -> list[RayRank]:
    """Start a rank on each slot (``part`` of its device), and return when all have met and built their engines.

    Raises what building raised, ``DiedError`` for a rank that dies, ``DeadlineError`` for one that hangs.
    """
    ray = import_ray()
    hosted = ray.remote(concurrency_groups={ALIVE: 1, _ASIDE: _CALLS_ASIDE})(RankActor)
    remotes = []
    for rank, slot in enumerate(slots):
        name = f"rank {rank} of the {role}"
        actor = hosted.options(name=name_in_cluster(name), **slot.options(part))
        remotes.append(Remote(actor.remote(rank, len(slots), role), name))
    try:
        meeting = remotes[0].ask("open_meeting", setup.meeting_s, awaited="its start", waits=START_SECONDS)
        packed = pack(setup)
        replies = [
            remote.submit("build", packed, meeting, slot.device(setup.device), awaited="its engine")
            for remote, slot in zip(remotes, slots, strict=True)
        ]
        pids = [reply.within(max(START_SECONDS, setup.meeting_s)) for reply in replies]
    except BaseException:
        for remote in remotes:
            remote.kill()
        raise
    return [RayRank(remote, pid) for remote, pid in zip(remotes, pids, strict=True)]


def gather_weights(
    group: TrainGroup[RayTrainRank], bucket_bytes: int, dtype: torch.dtype | None = None, part: Exported = "merged"
) -> RemoteWeights:
    """Gather ``part`` of the weights of a group of ranks in Ray's shared memory, bucket by bucket.

    Nothing passes through here. Floats come as ``dtype``, or without one as they are. The first rank owns the buckets:
    they end with it.
    """
    group.call(RayTrainRank.open_export, part)
    refs: BucketRefs = []
    while found := group.call(RayTrainRank.put_bucket, bucket_bytes, dtype):
        refs += found
    return RemoteWeights(refs)
