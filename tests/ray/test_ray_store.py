"""The Ray store: the cases of every store over real actors, what a death does, and that memory stays flat."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.base.errors import DiedError
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.dataflow.progress import Outcome
from tandem.dataflow.ray.store import RayStore
from tandem.dataflow.tickets import Ticket
from tests.dataflow.store_cases import COLUMNS, MakeStore, StoreCases, check_rows, fill, group, in_thread, ledger, take

ray = pytest.importorskip("ray")


class Renewed(RayStore):
    """A store that can start over in the processes it has: a fresh one for every case would cost seconds."""

    def renew(self, tickets: int, samples: int, lease_seconds: float, **options: Any) -> None:
        fresh = ledger(tickets, samples, **options)
        controller, units = self._controller.handle, [unit.handle for unit in self._units]
        self._tickets, self._samples = tickets, samples
        ray.get(controller.__ray_call__.remote(lambda actor: actor.__init__(fresh, lease_seconds)))
        ray.get([unit.__ray_call__.remote(lambda a: a.__init__(controller, samples)) for unit in units])


@pytest.fixture(scope="module", name="store")
def make_store(cluster: None) -> Iterator[MakeStore]:
    store = Renewed.start(ledger(1, 1), 60.0, units=2)
    assert isinstance(store, Renewed)

    def renewed(tickets: int = 4, samples: int = 2, *, lease_seconds: float = 60.0, **options: Any) -> RayStore:
        store.renew(tickets, samples, lease_seconds, **options)
        return store

    yield renewed
    store.close()


class TestRayStore(StoreCases):
    """Every call crosses two processes."""


@pytest.fixture
def doomed(cluster: None) -> Iterator[RayStore]:
    """A store of its own, for a test that kills parts of it."""
    store = RayStore.start(ledger(4, 2), 60.0, units=2)
    yield store
    store.close()


def kill(store: RayStore, name: str) -> None:
    (pid,) = [pid for actor, pid in store.pids().items() if name in actor]
    os.kill(pid, signal.SIGKILL)


def test_b83_a_dead_storage_unit_is_named_and_the_other_goes_on(doomed: RayStore) -> None:
    assert len({os.getpid(), *doomed.pids().values()}) == 4  # a ledger, two units, and this process
    fill(doomed)
    kill(doomed, "unit 1")
    started = time.monotonic()
    with pytest.raises(DiedError, match="storage unit 1 of the data plane died"):
        doomed.get([Ticket(0, place) for place in range(4)], COLUMNS)
    with pytest.raises(DiedError, match="storage unit 1"):
        doomed.put([Ticket(1, 3)], group(Ticket(1, 3)), timeout=20)
    assert time.monotonic() - started < 10
    check_rows(doomed.get([Ticket(0, 1)], COLUMNS), (Ticket(0, 1),))


def test_b83_a_dead_controller_ends_every_wait(doomed: RayStore) -> None:
    waits: list[Callable[[], object]] = [
        lambda: take(doomed, 4, timeout=100),
        lambda: doomed.seal(0, timeout=100),
        lambda: doomed.put([Ticket(9, 0)], group(Ticket(9, 0)), timeout=100),  # no room: earlier ones come first
    ]

    def ends(wait: Callable[[], object]) -> None:
        with pytest.raises(DiedError, match=r"controller of the data plane|a process that storage unit 0"):
            wait()

    started = time.monotonic()
    with ExitStack() as beside:
        for wait in waits:
            beside.enter_context(in_thread(partial(ends, wait)))
        time.sleep(0.3)  # most likely all of them wait by now; the outcome is the same if one comes later
        kill(doomed, "controller")
    assert time.monotonic() - started < 10


class Producer:
    """An actor that fills partitions and can be killed."""

    def __init__(self, store: RayStore) -> None:
        self._store = store

    def pid(self) -> int:
        return os.getpid()

    def fill(self, partition: int, tokens: int) -> list[Outcome]:
        tickets = [Ticket(partition, place) for place in range(4)]
        return self._store.put(tickets, wide(tickets, tokens), timeout=20)


def wide(tickets: list[Ticket], tokens: int) -> DataProto:
    """Groups of two samples of ``tokens`` tokens, each its own number."""
    rows = torch.arange(2 * len(tickets)).repeat_interleave(tokens)
    return DataProto({"responses": Ragged.from_lengths(rows, [tokens] * 2 * len(tickets))})


def test_what_a_dead_rollout_actor_had_put_stays(store: MakeStore) -> None:
    """Values large enough to travel through shared memory, whose owner is gone afterwards."""
    plane = store(4)
    producer = ray.remote(num_cpus=0)(Producer).remote(plane)
    assert ray.get(producer.fill.remote(0, 100_000)) == [Outcome.STORED] * 4
    os.kill(ray.get(producer.pid.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(producer.pid.remote())
    lease = take(plane, 4, timeout=20, order="canonical")
    got = plane.get(lease.tickets, ["responses"]).ragged("responses")
    assert torch.equal(got.values, torch.arange(8).repeat_interleave(100_000))


def used(store: RayStore) -> tuple[int, int]:
    """Bytes of the cluster's shared memory in use, and of the largest storage unit's own memory."""
    total, free = ray.cluster_resources()["object_store_memory"], ray.available_resources()["object_store_memory"]
    return int(total - free), max(own_memory(pid) for name, pid in store.pids().items() if "unit" in name)


def own_memory(pid: int) -> int:
    """Resident, without what is shared with other processes."""
    resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
def test_memory_stays_flat_over_hundreds_of_steps(store: MakeStore) -> None:
    """1.6 MB a step: kept, they would be 350 MB."""
    plane = store(4)
    assert isinstance(plane, RayStore)
    before = (0, 0)
    for step in range(220):
        tickets = [Ticket(step, place) for place in range(4)]
        plane.put(tickets, wide(tickets, 25_000), timeout=20)
        lease = take(plane, 4, partition=step)
        assert len(plane.get(lease.tickets, ["responses"]).ragged("responses").values) == 200_000
        plane.acknowledge(lease)
        plane.seal(step, timeout=20)
        plane.drop(step)
        if step == 20:
            before = used(plane)
    shared, own = (now - then for now, then in zip(used(plane), before, strict=True))
    assert shared < 30e6 and own < 30e6
    assert plane.status().held == 0


@pytest.mark.parametrize("which", ["storage unit 1 of the data plane", "the controller of the data plane"])
def test_a_part_that_is_stopped_is_named(doomed: RayStore, which: str) -> None:
    assert doomed.silent(20.0) == []
    pid = doomed.pids()[which]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert doomed.silent(1.0) == [f"{which} does not answer"]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert doomed.silent(20.0) == []
