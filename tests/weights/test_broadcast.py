"""Broadcasts over gloo between members that are threads here: who gets what, and what becomes of it on the way."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tandem.base.errors import ContractError, DeadlineError, DiedError, EngineDiedError, TandemError
from tandem.models.fingerprint import fingerprint
from tandem.transport.buckets import Bucket
from tandem.transport.circle import LOOPBACK, BrokenCircleError, Circle, Meeting, open_store
from tandem.transport.inbox import Brought, Inbox, ReceivedSnapshots
from tandem.transport.outbox import Outbox
from tandem.weights.broadcast import Broadcast, BroadcastSnapshots, Member
from tandem.weights.sync import LEFT_OUT, Weights, WeightSync
from tandem.weights.transfer import Transfer

CPU = torch.device("cpu")
PATIENCE_S = 20.0


class FaultySnapshots(ReceivedSnapshots):
    """``fault`` is called for each bucket that came."""

    def __init__(self, fault: Callable[[int], None]) -> None:
        super().__init__()
        self._fault, self._came = fault, 0

    def update(self, bucket: Bucket) -> None:
        super().update(bucket)
        self._came += 1
        self._fault(self._came)


class Process:
    """A ``Member``: the process of an engine, or one rank of a role that scores."""

    def __init__(self, name: str, fault: Callable[[int], None] | None = None) -> None:
        self.name, self.inbox = name, Inbox(CPU)
        if fault is not None:
            self.inbox._received = FaultySnapshots(fault)

    def receive(self, meeting: Meeting, index: int, senders: int, number: int, piece_bytes: int) -> None:
        self.inbox.receive(meeting, index, senders, number, piece_bytes)

    def give_up(self, key: str) -> None:
        self.inbox.give_up(key)


class Engine:
    """A receiver over some processes; the first has what it serves."""

    def __init__(self, *processes: Process, every: int = 1) -> None:
        self.processes, self._every = processes, every
        self.serving: dict[str, torch.Tensor] = {}
        self.loads: list[int] = []

    def members(self, version: int) -> Sequence[Member]:
        return () if version % self._every else self.processes

    def load(self, weights: Weights, version: int) -> str | None:
        if version % self._every:
            return LEFT_OUT
        assert isinstance(weights, Brought)
        answers = {fingerprint(process.inbox.take(weights.number)) for process in self.processes[1:]}
        self.serving = {n: t.clone() for n, t in self.processes[0].inbox.take(weights.number)}
        self.loads.append(version)
        (answer,) = answers | {fingerprint(self.serving.items())}
        return answer


class Boxes:
    """``Senders`` that are threads here. ``fault`` is called by a sender for each tensor that it gathers."""

    def __init__(self, live: dict[str, torch.Tensor], count: int, fault: Callable[[int, str], None] | None = None):
        self.live, self._fault = live, fault
        self.boxes = [Outbox(i, count, CPU) for i in range(count)]

    def __len__(self) -> int:
        return len(self.boxes)

    def name_of(self, index: int) -> str:
        return f"rank {index} of the actor"

    def open(self, number: int) -> None:
        for box in self.boxes:
            box.open(number)

    def gather(self, number: int) -> None:
        del number
        try:
            for i, box in enumerate(self.boxes):
                box.fill(self._pairs(i), 100)
                box.end()
        except BaseException:
            for box in self.boxes:  # ranks gather together, so what fails in one fails in all
                box.fail()
            raise

    def send(self, index: int, meeting: Meeting, number: int, piece_bytes: int) -> None:
        self.boxes[index].send(meeting, number, piece_bytes)

    def give_up(self, index: int, key: str) -> None:
        self.boxes[index].give_up(key)

    def parts(self, number: int) -> list[tuple[str, int]]:
        return [box.fingerprint(number, PATIENCE_S) for box in self.boxes]

    def pairs(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError

    def _pairs(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.live.items():
            if self._fault is not None:
                self._fault(index, name)
            yield name, tensor


class Sent:
    """Weights of a trainer, and what sends them to ``engines``."""

    def __init__(self, *, senders: int = 2, deadline_s: float = PATIENCE_S, fault: object = None, **engines: Engine):
        self.live = {f"w{i}": torch.randn(7, i) for i in range(12)} | {"b": torch.randn(9).bfloat16()}
        self.boxes = Boxes(self.live, senders, fault)  # type: ignore[arg-type]
        self.broadcast = Broadcast(self.boxes, host=LOOPBACK, backend="gloo", deadline_s=deadline_s, piece_bytes=64)
        self.acknowledged: list[tuple[str, int]] = []
        self.sync = WeightSync(
            BroadcastSnapshots(self.boxes, self.broadcast),
            engines,
            require_actor=lambda purpose: None,
            acknowledged=lambda name, version: self.acknowledged.append((name, version)),
            deadline_s=deadline_s,
        )

    def train(self) -> None:
        for tensor in self.live.values():
            tensor.add_(1.0)

    def sent(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.live.items()}


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return list(some) == list(others) and all(torch.equal(some[name], others[name]) for name in some)


def test_engines_and_the_ranks_of_a_scoring_role_get_every_version_from_two_senders() -> None:
    """One that takes every other version is in the group for those alone, and no default group is made."""
    default = dist.group.WORLD  # one process may have run tests that make it
    one, two = Engine(Process("rollout-0")), Engine(Process("rollout-1"))
    forward, reference = Engine(Process("fwd 0"), Process("fwd 1")), Engine(Process("ref 0"), every=2)
    run = Sent(one=one, two=two, actor_fwd=forward, reference=reference)
    for version in range(1, 7):
        run.train()
        phases = run.sync.push(version)
        assert {"snapshot", "transfer"} <= set(phases)
        assert all(same(engine.serving, run.live) for engine in (one, two, forward))
        assert same(reference.serving, run.live) is (version % 2 == 0)
    assert one.loads == two.loads == forward.loads == [1, 2, 3, 4, 5, 6]
    assert reference.loads == [2, 4, 6]
    assert run.sync.nbytes == sum(tensor.nbytes for tensor in run.live.values())
    assert run.broadcast._keys == 2  # groups, each made once
    assert dist.group.WORLD is default


def test_the_first_buckets_have_arrived_before_the_last_are_gathered() -> None:
    came = threading.Event()
    engine = Engine(Process("rollout-0", fault=lambda number: came.set()))

    def gathering(index: int, name: str) -> None:
        if name == "b":
            assert came.wait(PATIENCE_S)  # else nothing is sent until all is there

    run = Sent(senders=1, fault=gathering, one=engine)
    run.sync.push(1)
    assert same(engine.serving, run.live)


def test_an_engine_that_is_lost_midway_keeps_its_version_and_the_others_get_the_new_one() -> None:
    def fault(number: int) -> None:
        if number == 20:  # in the second push
            raise EngineDiedError("rollout engine 'rollout-1' was killed by SIGKILL")

    one, two = Engine(Process("rollout-0")), Engine(Process("rollout-1", fault))
    run = Sent(one=one, two=two)
    run.sync.push(1)
    first = run.sent()
    run.train()
    with pytest.raises(EngineDiedError, match="rollout-1"):
        run.sync.push(2)
    run.sync.leave("two")
    run.sync.wait()
    assert same(one.serving, run.live) and one.loads == [1, 2]
    assert same(two.serving, first) and two.loads == [1]
    assert two.processes[0].inbox._received.finished == [1]
    run.train()
    run.sync.push(3)
    assert same(one.serving, run.live)


def test_a_late_joiner_gets_the_last_version_though_the_trainer_went_on() -> None:
    one, late = Engine(Process("rollout-0")), Engine(Process("rollout-1"))
    run = Sent(one=one)
    run.sync.push(1)
    first = run.sent()
    run.train()
    run.sync.join("late", late)
    assert same(late.serving, first) and late.loads == [1]
    run.sync.push(2)
    assert same(one.serving, run.live) and same(late.serving, run.live)


def test_a_sender_that_dies_midway_leaves_the_old_version_serving() -> None:
    one, two = Engine(Process("rollout-0")), Engine(Process("rollout-1"))
    run = Sent(one=one, two=two)
    run.sync.push(1)
    first = run.sent()
    sending = run.boxes.boxes[1].buckets

    def dying(number: int, seconds: float) -> Iterable[Bucket]:
        yield next(iter(sending(number, seconds)))
        raise DiedError("rank 1 of the actor died")

    run.boxes.boxes[1].buckets = dying  # type: ignore[assignment]
    run.train()
    with pytest.raises(DiedError, match="rank 1 of the actor died"):
        run.sync.push(2)
    for engine in (one, two):
        assert same(engine.serving, first) and engine.loads == [1]
        assert engine.processes[0].inbox._received.finished == [1]
        with pytest.raises(ContractError, match=r"did not arrive here as a whole: it has \[1\]"):
            engine.processes[0].inbox.take(2)


def test_weights_that_can_not_be_gathered_are_given_up_by_all() -> None:
    engine = Engine(Process("rollout-0"))
    pushed = threading.Event()

    def gathering(index: int, name: str) -> None:
        if pushed.is_set() and name == "w9":
            raise TandemError("rank 0 ran out of memory")

    run = Sent(fault=gathering, one=engine)
    run.sync.push(1)
    first = run.sent()
    pushed.set()
    run.train()
    with pytest.raises(TandemError, match="rank 0 ran out of memory"):
        run.sync.push(2)
    with pytest.raises(TandemError, match="gave them up"):
        run.sync.wait()
    assert same(engine.serving, first)


def test_who_does_not_take_part_is_named_at_the_deadline() -> None:
    going_on = threading.Event()

    def hanging(number: int) -> None:
        going_on.wait(PATIENCE_S)

    one, two = Engine(Process("rollout-0")), Engine(Process("rollout-1", hanging))
    run = Sent(deadline_s=1.5, one=one, two=two)
    waking = threading.Timer(3.0, going_on.set)
    waking.start()
    with pytest.raises(DeadlineError, match=r"waited 1\.5 s for a broadcast of weights; blocked by .*rollout-1"):
        run.sync.push(1)
    assert one.loads == two.loads == []
    waking.join()


def test_a_sender_that_hangs_is_named_at_the_deadline_and_not_those_who_wait_for_it() -> None:
    one, two = Engine(Process("rollout-0")), Engine(Process("rollout-1"))
    run = Sent(deadline_s=1.5, one=one, two=two)
    going_on = threading.Event()

    def hanging(number: int, seconds: float) -> Iterable[Bucket]:
        going_on.wait(PATIENCE_S)
        raise BrokenCircleError("it was given up meanwhile")
        yield

    run.boxes.boxes[1].buckets = hanging  # type: ignore[assignment]
    waking = threading.Timer(4.0, going_on.set)
    waking.start()
    with pytest.raises(DeadlineError, match=r"broadcast of weights; blocked by rank 1 of the actor$"):
        run.sync.push(1)
    assert one.loads == two.loads == []
    waking.join()


def test_members_that_do_not_come_are_counted() -> None:
    store = open_store(LOOPBACK, None, timedelta(seconds=5))
    meeting = Meeting(LOOPBACK, store.port, "weights 1", size=3, backend="gloo", seconds=0.5)
    other = Transfer("other", lambda: Circle(meeting, 1, "sender 0", CPU).join())
    with pytest.raises(BrokenCircleError, match="1 of 3 members of the broadcast around sender 0 did not come"):
        Circle(meeting, 0, "sender 0", CPU).join()
    with pytest.raises(BrokenCircleError, match="did not come"):
        other.result()


def test_a_port_that_can_not_be_reached_is_named_with_what_to_do() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
    meeting = Meeting(LOOPBACK, port, "weights 1", size=2, backend="gloo", seconds=1.0)
    with pytest.raises(TandemError, match=rf"can't reach 127\.0\.0\.1:{port}.*transport: shared_memory") as caught:
        Circle(meeting, 0, "sender 0", CPU).join()
    assert not isinstance(caught.value, BrokenCircleError)


def test_a_receiver_that_can_not_reach_the_meeting_is_told_apart_from_those_who_wait_for_it() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]

    class Elsewhere(Process):
        def receive(self, meeting: Meeting, index: int, senders: int, number: int, piece_bytes: int) -> None:
            super().receive(replace(meeting, port=port), index, senders, number, piece_bytes)

    one, lost = Engine(Process("rollout-0")), Engine(Elsewhere("rollout-1"))
    run = Sent(deadline_s=6.0, one=one, lost=lost)
    with pytest.raises(TandemError, match=rf"can't reach 127\.0\.0\.1:{port}.*Open the ports"):
        run.sync.push(1)
    run.sync.leave("lost")
    run.sync.wait()
    assert same(one.serving, run.live) and lost.loads == []


def test_a_backend_that_needs_a_gpu_is_refused_by_a_process_without_one() -> None:
    store = open_store(LOOPBACK, None, timedelta(seconds=5))
    meeting = Meeting(LOOPBACK, store.port, "weights 1", size=1, backend="nccl", seconds=5.0)
    with pytest.raises(TandemError, match="a broadcast over nccl needs a GPU in every process, and one is on cpu"):
        Circle(meeting, 0, "sender 0", CPU).join()
