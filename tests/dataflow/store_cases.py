"""What every store must do: groups of tensors between threads. A test module per store makes a class of these cases."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.base.errors import ContractError, DeadlineError, StarvationError
from tandem.columns.equality import same_ragged
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.dataflow.gate import Closed, Gate
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.progress import Outcome
from tandem.dataflow.store import DataPlane
from tandem.dataflow.tickets import Lease, Request, Ticket

COLUMNS = ("responses", "rewards", "uid")


class MakeStore(Protocol):
    """A fresh store for partitions of ``tickets`` groups; ``options`` are those of its ledger."""

    def __call__(
        self, tickets: int = 4, samples: int = 2, *, lease_seconds: float = 60.0, **options: Any
    ) -> DataPlane: ...


def ledger(tickets: int, samples: int, **options: Any) -> Ledger:
    return Ledger(tickets, samples, **({"capacity": 4 * tickets, "max_draws": 4} | options))


def sample_id(ticket: Ticket, sample: int) -> int:
    return ((ticket.partition * 100 + ticket.place) * 10 + ticket.attempt) * 10 + sample


def group(*tickets: Ticket) -> DataProto:
    """Rows that say in every column which sample they are, two to a ticket; row lengths differ."""
    ids = [sample_id(ticket, i) for ticket in tickets for i in range(2)]
    return DataProto(
        {"responses": [torch.full((i % 4,), i) for i in ids], "rewards": torch.tensor(ids, dtype=torch.float32)},
        {"uid": [str(i) for i in ids]},
    )


def check_rows(data: DataProto, tickets: tuple[Ticket, ...], samples: int = 2) -> None:
    ids = [sample_id(ticket, i) for ticket in tickets for i in range(samples)]
    assert data.dense("rewards").tolist() == ids
    assert [row.tolist() for row in data.ragged("responses")] == [[i] * (i % 4) for i in ids]
    assert data.non_tensor_batch["uid"] == [str(i) for i in ids]
    assert data.dense("group_ids").tolist() == [ticket.place for ticket in tickets for _ in range(samples)]
    assert data.dense("sample_index").tolist() == list(range(samples)) * len(tickets)


def fill(plane: DataPlane, tickets: int = 4, partition: int = 0) -> None:
    for place in range(tickets):
        plane.put([Ticket(partition, place)], group(Ticket(partition, place)), timeout=0)


def take(plane: DataPlane, count: int, task: str = "train", **options: Any) -> Lease:
    timeout = options.pop("timeout", 0.0)
    lease = plane.take(Request(task, ["responses"], count, **({"partition": 0} | options)), timeout=timeout)
    assert lease is not None
    return lease


@contextmanager
def in_thread(work: Callable[[], Any]) -> Iterator[None]:
    """Run ``work`` beside the block; both have ended afterwards, or the test fails."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(20)
    assert not thread.is_alive()
    assert not problems


class StoreCases:
    """Needs a class-scoped fixture ``store``: a ``MakeStore``."""

    # One test for several stores on purpose: what hypothesis calls executors are the classes of these cases.
    @settings(max_examples=60, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow])
    @given(st.data())
    def test_b01_what_comes_out_does_not_depend_on_how_it_was_cut(self, store: MakeStore, data: st.DataObject) -> None:
        """Any packing of groups into puts and any order of get give each group's own rows."""
        plane = store(6)
        places = data.draw(st.permutations(range(6)))
        while places:
            size = data.draw(st.integers(1, len(places)))
            tickets, places = [Ticket(0, place) for place in places[:size]], places[size:]
            plane.put(tickets, group(*tickets), timeout=0)
        slices = [
            take(plane, count, order="arrival") for count in data.draw(st.sampled_from([[6], [2, 4], [3, 3], [1, 5]]))
        ]
        for lease in slices:
            check_rows(plane.get(lease.tickets, COLUMNS), lease.tickets)
        order = tuple(data.draw(st.permutations([ticket for lease in slices for ticket in lease.tickets])))
        check_rows(plane.get(order, COLUMNS), order)

    def test_b32_ids_come_out_as_they_were_sampled(self, store: MakeStore) -> None:
        plane = store(1)
        sampled = [torch.tensor([11, 12, 2**40]), torch.tensor([], dtype=torch.int64)]
        plane.put([Ticket(0, 0)], DataProto({"responses": sampled}), timeout=0)
        stored = plane.get([Ticket(0, 0)], ["responses"]).ragged("responses")
        assert same_ragged(stored, Ragged.from_rows(sampled))

    def test_columns_are_added_stage_by_stage(self, store: MakeStore) -> None:
        plane = store(4)
        fill(plane)
        for _ in range(2):
            lease = take(plane, 2, "ref")
            answer = plane.get(lease.tickets, ["responses"])
            ref = answer.ragged("responses")
            column = DataProto({"ref_logprobs": ref.like(-ref.values.float())})
            assert plane.put(lease.tickets, column, timeout=0) == [Outcome.STORED] * 2
            assert plane.put(lease.tickets, column, timeout=0) == [Outcome.DUPLICATE] * 2
            plane.acknowledge(lease)
        assert plane.take(Request("ref", ["responses"], 2, 0), timeout=0) is None  # it has read them all
        lease = plane.take(Request("train", ["ref_logprobs", "group_ids"], 4, 0, "canonical"), timeout=0)
        assert lease is not None
        merged = plane.get(lease.tickets, [*COLUMNS, "ref_logprobs"])
        check_rows(merged, lease.tickets)
        assert torch.equal(merged.ragged("ref_logprobs").values, -merged.ragged("responses").values.float())

    def test_b60_what_arrives_for_a_dropped_draw_leaves_its_successor_alone(self, store: MakeStore) -> None:
        plane, late, current = store(1), Ticket(0, 0), Ticket(0, 0, 1)
        plane.put([late], group(late), timeout=0)
        plane.drop(late, "filtered")
        plane.put([current], group(current), timeout=0)
        assert plane.put([late], group(late), timeout=0) == [Outcome.STALE]
        assert plane.drop(late, "filtered") is Outcome.STALE
        check_rows(plane.get([current], COLUMNS), (current,))

    def test_a_take_wakes_up_when_its_last_group_arrives(self, store: MakeStore) -> None:
        plane, got = store(3), []
        with in_thread(lambda: got.append(take(plane, 3, timeout=20, order="canonical"))):
            fill(plane, 3)
        assert [ticket.place for ticket in got[0].tickets] == [0, 1, 2]

    def test_a_seal_wakes_up_when_the_partition_is_full(self, store: MakeStore) -> None:
        plane = store(3)
        with in_thread(lambda: plane.seal(0, timeout=20)):
            fill(plane, 3)
        assert plane.status().partitions[0].sealed

    def test_a_lease_of_a_dead_consumer_ends_while_others_wait(self, store: MakeStore) -> None:
        plane = store(2, lease_seconds=0.05)
        fill(plane, 2)
        dead = take(plane, 2, consumer="dead")
        alive = take(plane, 2, consumer="alive", timeout=20)
        assert alive.tickets == dead.tickets
        with pytest.raises(ContractError, match="over"):
            plane.acknowledge(dead)
        time.sleep(0.1)  # the second one dies too
        assert take(plane, 1).tickets == dead.tickets[:1]

    def test_every_wait_names_who_blocks(self, store: MakeStore) -> None:
        plane = store(2, capacity=2)
        plane.assign(Ticket(0, 1), "rollout-7")
        plane.put([Ticket(0, 0)], group(Ticket(0, 0)), timeout=0)
        with pytest.raises(
            DeadlineError, match=r"1 of 2 groups unfilled: ticket 1 \(attempt 0\) on engine 'rollout-7'"
        ):
            take(plane, 2, timeout=0.01)
        with pytest.raises(DeadlineError, match=r"seal of partition 0; blocked by .*rollout-7"):
            plane.seal(0, timeout=0)
        plane.put([Ticket(0, 1)], group(Ticket(0, 1)), timeout=0)
        take(plane, 2, consumer="actor")
        with pytest.raises(DeadlineError, match="lent to actor"):
            take(plane, 2)
        with pytest.raises(
            DeadlineError, match=r"full: 2 of 2 groups held; partition 0 .* task 'train' has consumed 0"
        ):
            plane.put([Ticket(1, 0)], group(Ticket(1, 0)), timeout=0.01)
        with pytest.raises(DeadlineError, match="ref_logprobs in 2 groups"):
            plane.take(Request("late", ["ref_logprobs"], 1, 0), timeout=0)

    def test_starvation_reaches_the_waiting_consumer(self, store: MakeStore) -> None:
        plane = store(1, max_draws=2)

        def starve() -> None:
            plane.drop(Ticket(0, 0), "all rewards equal")
            with pytest.raises(StarvationError):
                plane.drop(Ticket(0, 0, 1), "all rewards equal")

        with in_thread(starve), pytest.raises(StarvationError, match="all rewards equal"):
            take(plane, 1, timeout=20)

    @pytest.mark.parametrize("staleness", [0, 1])
    def test_b45_a_producer_twice_too_fast_is_held_back_and_loses_nothing(
        self, store: MakeStore, staleness: int
    ) -> None:
        """No consumer at first, room for one partition: the producer blocks; later all arrives, within the bound."""
        plane, one = store(4, capacity=4), Gate(4, staleness, last=2)
        one.join("a")
        one.acknowledge("a", 0)
        held_back, lags = threading.Event(), []

        def produce() -> None:
            while not isinstance(ticket := one.admit("a"), Closed) or not ticket.exhausted:
                if isinstance(ticket, Closed):
                    held_back.set()
                    time.sleep(0.001)
                    continue
                version = one.published
                try:
                    plane.put([ticket], group(ticket), timeout=0)
                except DeadlineError:
                    held_back.set()
                    plane.put([ticket], group(ticket), timeout=20)
                assert version is not None
                lags.append(ticket.partition - version)
                one.done(ticket)

        with in_thread(produce):
            assert held_back.wait(20)
            assert plane.status().held == 4
            for step in range(2):
                lease = take(plane, 4, timeout=20, partition=step, order="canonical")
                check_rows(plane.get(lease.tickets, COLUMNS), lease.tickets)
                plane.seal(step, timeout=20)
                plane.drop(step)
                one.acknowledge("a", step + 1)
        assert max(lags) <= staleness
        accounts = plane.status().accounts
        assert (accounts.produced, accounts.trained, accounts.dropped) == (16, 16, {})

    def test_b53_two_consumers_share_a_partition_without_loss(self, store: MakeStore) -> None:
        plane, seen, lock = store(10), [], threading.Lock()

        def consume() -> None:
            while lease := plane.take(Request("ref", ["responses"], 3, 0), timeout=20):
                with lock:
                    seen.extend(lease.tickets)
                plane.acknowledge(lease)

        with in_thread(consume), in_thread(consume):
            fill(plane, 10)
        assert sorted(seen) == [Ticket(0, place) for place in range(10)]

    @pytest.mark.parametrize(
        ("broken", "message"),
        [
            (lambda plane: plane.put([Ticket(0, 0)], group(Ticket(0, 0))[:1], timeout=0), "1 tickets of 2 samples"),
            (lambda plane: plane.get([Ticket(0, 0)], ["responses"]), "holds no group"),
            (lambda plane: (fill(plane), plane.get([Ticket(0, 0)], ["advantages"])), "'advantages' is not ready"),
            (lambda plane: plane.drop(0), "isn't sealed"),
            (
                lambda plane: plane.put(
                    [Ticket(0, 3)], group(Ticket(0, 3)).union(DataProto({"group_ids": torch.tensor([3, 4])})), timeout=0
                ),
                "'group_ids' must be",
            ),
        ],
    )
    def test_misuse_is_named(self, store: MakeStore, broken: Any, message: str) -> None:
        with pytest.raises(ContractError, match=message):
            broken(store())
