"""The Ray cluster of a run: joined where there is one, else started on this machine; devices counted, then reserved."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from tandem.base.deadline import Deadline
from tandem.base.device_kinds import CPU, CUDA, named_device
from tandem.base.errors import ConfigError, DeadlineError, Problem, TandemError, sentences
from tandem.remote.calls import import_ray, name_in_cluster
from tandem.runtime.ray.devices import GPU, SLOT, SLOTS_PER_CORE, Inventory, Share, require_devices

ADDRESS = "RAY_ADDRESS"
_MODULES = "PYTHONPATH"
_OTHER_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_CONNECT_S = 5.0
_RESERVE_S = 15.0


def connect() -> bool:
    """Join the cluster that ``RAY_ADDRESS`` names, as inside ``ray job submit``, else start one on this machine.

    Says whether this process started it, and so has to end it. A process that is connected already stays so. Workers
    need the same ``RAY_AUTH_MODE`` (and token) as the cluster: it is taken from the environment, as Ray does.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    with _own_signals():
        return _connect(ray)


def _connect(ray: Any) -> bool:
    address = os.environ.get(ADDRESS, "")
    if address:
        _check_address(address)
        try:
            with _loopback(ray) if _is_of_this_machine(ray, address) else nullcontext():
                ray.init(address=address, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise TandemError(
                sentences(
                    f"no Ray cluster answers at {ADDRESS}={address}: {_first_line(error)}",
                    "A new cluster wants a token: set RAY_AUTH_MODE=token, or what was set there (here: "
                    f"{os.environ.get('RAY_AUTH_MODE', 'unset')})",
                    f"Else start one (ray start --head), or unset {ADDRESS} to run on this machine alone",
                )
            ) from error
        return False
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    slots = SLOTS_PER_CORE * cores
    with _our_modules(), _loopback(ray):
        ray.init("local", include_dashboard=False, resources={SLOT: slots}, logging_level=logging.WARNING)
    return True


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep what SIGTERM does to this process as it was: Ray makes it abort with a dump of the stack."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _loopback(ray: Any) -> Iterator[None]:
    """Keep a cluster that is started inside to this machine, with none of its ports open to others.

    Ray has a setting for that, which it reads when it is imported and hands down to what it starts. Where the user has
    set it, it stays; a Ray without it listens on all addresses, as ever.
    """
    if _OTHER_MACHINES in os.environ:
        yield
        return
    constants: Any = getattr(getattr(ray, "_private", None), "ray_constants", None)
    before = getattr(constants, "ENABLE_RAY_CLUSTER", None)
    os.environ[_OTHER_MACHINES] = "0"
    try:
        if before is not None:
            constants.ENABLE_RAY_CLUSTER = False
        yield
    finally:
        del os.environ[_OTHER_MACHINES]
        if before is not None:
            constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _our_modules() -> Iterator[None]:
    """Let a cluster that is started inside find every module that this process finds: its actors inherit the
    environment.
    """
    before = os.environ.get(_MODULES)
    os.environ[_MODULES] = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    try:
        yield
    finally:
        del os.environ[_MODULES]
        if before is not None:
            os.environ[_MODULES] = before


def disconnect() -> None:
    """Leave the cluster; one that this process started ends."""
    import_ray().shutdown()


def _check_address(address: str) -> None:
    """Refuse in seconds what Ray would try to reach for minutes."""
    if address.startswith(("http://", "https://")):
        raise TandemError(
            f"{ADDRESS}={address} is the dashboard, where `ray job submit` sends jobs. To join the cluster itself "
            f"write {ADDRESS}=HOST:6379 (or auto). To submit a job: ray job submit --address={address} -- "
            "python -m tandem train …"
        )
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # auto, local: Ray's own words
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise TandemError(
            sentences(
                f"no Ray cluster answers at {ADDRESS}={address}: {error}",
                f"Start one (ray start --head), or unset {ADDRESS} to run on this machine alone",
            )
        ) from error


def _is_of_this_machine(ray: Any, address: str) -> bool:
    """Return whether the cluster answers on this machine's loopback and not under its name: a run has started it for
    itself.

    Ray takes the one for the other, and would look for it where it is not.
    """
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost") or not port.isdigit():
        return False
    own = str(ray.util.get_node_ip_address())
    try:
        socket.create_connection((own, int(port)), _CONNECT_S).close()
    except OSError:
        return True
    return False


def inventory(device: str = "auto") -> Inventory:
    """Return what the connected cluster has for models that compute on ``device``."""
    ray = import_ray()
    nodes = {node["NodeManagerAddress"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    return Inventory.of(nodes, ray.available_resources(), device)


@dataclass(frozen=True)
class Slot:
    """A device for one actor: bundle ``index`` of a placement group. ``kind`` is the resource that counts it, and
    ``number`` the place of the device among all that were reserved."""

    group: Any
    index: int
    kind: str
    number: int = 0

    def device(self, wanted: str) -> str:
        """Say what an actor here computes on, where ``runtime.device`` is ``wanted``: what is reserved.

        Of Ray's GPUs a process sees its own alone. Devices that a plugin brings it sees all, and takes the one with the
        number of the slot. Raises ``ConfigError`` where CUDA is wanted and the cluster has no GPU.
        """
        if self.kind == GPU:
            return CUDA
        if wanted == CUDA:
            reason = "the cluster counts no GPU that could be reserved"
            raise ConfigError([Problem("runtime.device", wanted, reason, "Write cpu, or start Ray where its GPUs are")])
        return CPU if wanted == "auto" else named_device(wanted, self.number)

    def options(self, part: float = 1.0) -> dict[str, Any]:
        """Return the options of a Ray actor that has ``part`` of the device, and dies with it."""
        strategies = import_ray().util.scheduling_strategies
        strategy = strategies.PlacementGroupSchedulingStrategy(self.group, self.index)
        return {"scheduling_strategy": strategy, "max_restarts": 0, "num_cpus": 0, **_amount(self.kind, part)}


def reserve(shares: Sequence[Share], timeout: float = _RESERVE_S, device: str = "auto") -> dict[str, list[Slot]]:
    """Reserve devices for every share, by device group; each is held until the cluster is left.

    A bundle is one device: Ray deals actors with parts of devices to any device of a bundle that has room, so that two
    ranks would meet on one. The devices of a node are a placement group, which keeps them together.

    Raises ``ConfigError`` at once where there are too few, and ``DeadlineError`` after ``timeout`` seconds where others
    hold them.
    """
    ray = import_ray()
    there = inventory(device)
    require_devices(shares, there)
    placed = ray.util.placement_group
    groups = {
        s.group: [
            placed(
                [{there.kind: 1.0}] * s.per_node, "STRICT_PACK", name_in_cluster(f"{'+'.join(s.roles)}, node {node}")
            )
            for node in range(s.nodes)
        ]
        for s in shares
    }
    deadline = Deadline(timeout)
    for share in shares:
        if not all(group.wait(timeout_seconds=deadline.left) for group in groups[share.group]):
            for group in chain.from_iterable(groups.values()):
                ray.util.remove_placement_group(group)
            raise DeadlineError(
                f"waited {timeout:g} s for the devices of {share}; the cluster has {there}. Others hold them, or no "
                f"node has {share.per_node} left: free some, or ask for less in execution.resource"
            )
    numbers = count()
    return {
        share.group: [
            Slot(group, index, there.kind, next(numbers))
            for group in groups[share.group]
            for index in range(share.per_node)
        ]
        for share in shares
    }


def release(slots: Mapping[str, Sequence[Slot]]) -> None:
    """Give reserved devices back; actors on them end."""
    ray = import_ray()
    for slot in chain.from_iterable(slots.values()):
        if slot.index == 0:
            ray.util.remove_placement_group(slot.group)


def _amount(kind: str, part: float) -> dict[str, Any]:
    """Return the resource in the words of an actor's options."""
    words = {"GPU": {"num_gpus": part}, "CPU": {"num_cpus": part}}
    return words.get(kind, {"resources": {kind: part}})


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
