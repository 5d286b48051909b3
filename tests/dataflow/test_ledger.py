"""The ledger: one small test per rule, and a state machine for the two conservation laws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest

from tandem.base.errors import ContractError, StarvationError
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.progress import Accounts, Outcome
from tandem.dataflow.tickets import Lease, Request, Ticket

FIRST = ("responses", "rollout_logprobs")


def ledger(tickets: int = 4, samples: int = 2, *, capacity: int | None = None, **options: Any) -> Ledger:
    return Ledger(tickets, samples, capacity=capacity or 3 * tickets, max_draws=options.pop("max_draws", 5), **options)


def fill(book: Ledger, places: Sequence[int], partition: int = 0) -> None:
    for place in places:
        assert book.put(Ticket(partition, place), FIRST, now=0.0) is Outcome.STORED


def take(
    book: Ledger,
    count: int,
    *,
    task: str = "train",
    columns: Sequence[str] = ("responses",),
    partition: int | None = 0,
    order: Literal["arrival", "canonical"] = "arrival",
    now: float = 0.0,
) -> Lease | None:
    return book.take(Request(task, columns, count, partition, order, consumer="me"), now=now, seconds=10.0)


def places(lease: Lease | None) -> list[int]:
    assert lease is not None
    return [ticket.place for ticket in lease.tickets]


def test_b01_slices_are_whole_groups_however_large() -> None:
    """The same groups come out for every slice size, each group in one slice."""
    for count in (1, 2, 4, 8):
        book = ledger(8, 8)
        fill(book, range(8))
        slices = [places(take(book, count)) for _ in range(8 // count)]
        assert [len(part) for part in slices] == [count] * (8 // count)
        assert sorted(place for part in slices for place in part) == list(range(8))


def test_b53_surplus_groups_stay_queued() -> None:
    book = ledger(12, 1)
    fill(book, range(10))
    assert [len(places(take(book, 4))) for _ in range(2)] == [4, 4]
    assert take(book, 4) is None  # two left, two still to come
    fill(book, [10, 11])
    assert places(take(book, 4)) == [8, 9, 10, 11]
    assert book.accounts().queued == book.accounts().produced == 12


def test_the_last_slice_is_what_is_left() -> None:
    book = ledger(10, 1)
    fill(book, range(10))
    leases = [take(book, 4) for _ in range(3)]
    assert [len(places(lease)) for lease in leases] == [4, 4, 2]
    assert not book.exhausted("train", 0)
    for lease in leases:
        assert lease is not None
        book.acknowledge(lease, 1.0)
    assert book.exhausted("train", 0)


def test_b45_a_full_ledger_refuses_and_evicts_nothing() -> None:
    book = ledger(4, 2, capacity=8)
    outcomes = [book.put(Ticket(k, place), FIRST, 0.0) for k in range(4) for place in range(4)]
    assert outcomes == [Outcome.STORED] * 8 + [Outcome.FULL] * 8
    assert (book.held, book.accounts().produced, book.accounts().dropped) == (8, 16, {})
    assert book.seal(0, 0.0)
    book.retire(0)
    assert book.put(Ticket(2, 0), FIRST, 0.0) is Outcome.STORED


def test_b45_running_ahead_never_takes_the_room_of_earlier_partitions() -> None:
    """Partition 1 floods the ledger first; every ticket of partition 0 still finds room, so nothing can lock up."""
    book = ledger(4, 1, capacity=6)
    ahead = [book.put(Ticket(1, place), FIRST, 0.0) for place in range(4)]
    assert ahead == [Outcome.STORED] * 2 + [Outcome.FULL] * 2
    fill(book, range(4))
    assert book.seal(0, 0.0)


def test_consumption_is_counted_per_task_and_column() -> None:
    book = ledger(2, 2)
    fill(book, [0, 1])
    assert take(book, 2, task="train", columns=("responses", "ref_logprobs")) is None
    ref = take(book, 1, task="ref")
    assert ref is not None
    assert book.put(ref.tickets[0], ["ref_logprobs"], 0.0) is Outcome.STORED
    book.acknowledge(ref, 0.0)
    assert places(take(book, 1, task="train", columns=("responses", "ref_logprobs"))) == [0]
    assert places(take(book, 1, task="ref")) == [1]
    assert take(book, 1, task="ref") is None


def test_canonical_order_waits_for_the_next_ticket() -> None:
    book = ledger(4, 1)
    assert take(book, 4, task="ref") is None
    fill(book, [3, 0, 2])
    assert take(book, 2, order="canonical") is None
    assert places(take(book, 1, order="canonical")) == [0]
    fill(book, [1])
    assert places(take(book, 2, order="canonical")) == [1, 2]
    assert places(take(book, 2, order="arrival", task="ref")) == [3, 0]


def test_without_a_partition_the_earliest_that_can_serve_does() -> None:
    book = ledger(2, 1)
    fill(book, [0], partition=0)
    fill(book, [0, 1], partition=1)
    lease = take(book, 2, partition=None)
    assert lease is not None
    assert lease.partition == 1
    assert take(book, 2, partition=None) is None


def test_a_dead_consumers_groups_come_back_first() -> None:
    book = ledger(4, 1)
    fill(book, range(4))
    dead, alive = take(book, 2), take(book, 1)
    assert dead is not None
    assert alive is not None
    book.acknowledge(alive, 9.0)
    assert book.next_expiry() == 10.0
    assert places(take(book, 2, now=10.0)) == [0, 1]
    with pytest.raises(ContractError, match="lease 1 of task 'train' on partition 0 is over"):
        book.acknowledge(dead, 11.0)
    book.give_back(dead)  # harmless
    assert places(take(book, 2, now=12.0)) == [3]


def test_a_filtered_group_is_refilled_under_the_next_attempt() -> None:
    book = ledger(2, 2)
    fill(book, [0, 1])
    lease = take(book, 2)
    assert lease is not None
    assert book.drop(Ticket(0, 0), "all rewards equal", 1.0) is Outcome.DROPPED
    assert book.drop(Ticket(0, 0), "again", 1.0) is Outcome.STALE
    book.acknowledge(lease, 1.0)  # what of it is still there
    assert not book.seal(0, 1.0)
    assert book.put(Ticket(0, 0, 1), FIRST, 2.0) is Outcome.STORED
    assert places(take(book, 2)) == [0]
    assert book.seal(0, 3.0)
    with pytest.raises(ContractError, match="sealed"):
        book.drop(Ticket(0, 1), "too late", 3.0)
    book.retire(0)
    assert (book.accounts().trained, book.accounts().dropped) == (4, {"all rewards equal": 2})


@pytest.mark.parametrize("put_first", [True, False])
def test_draws_in_vain_end_with_the_cause(put_first: bool) -> None:
    book = ledger(2, 2, max_draws=3)
    for attempt in range(3):
        ticket = Ticket(0, 1, attempt)
        if put_first:
            book.put(ticket, FIRST, 0.0)
        if attempt < 2:
            book.drop(ticket, "all rewards equal", 0.0)
    with pytest.raises(StarvationError, match=r"ticket 1 was drawn 3 times.*'all rewards equal'"):
        book.drop(Ticket(0, 1, 2), "all rewards equal", 0.0)
    for waits in (lambda: take(book, 1), lambda: book.seal(0, 0.0)):
        with pytest.raises(StarvationError, match="3 x all rewards equal"):
            waits()
    book.accounts().check()


def test_the_first_of_two_equal_groups_stays_and_the_other_is_counted() -> None:
    book = ledger(1, 3)
    fill(book, [0])
    assert book.put(Ticket(0, 0), FIRST, 0.0) is Outcome.DUPLICATE
    assert book.accounts().dropped == {"duplicate": 3}
    assert book.seal(0, 0.0)
    book.accounts().check()


def test_late_groups_of_a_finished_partition_are_counted() -> None:
    book = ledger(1, 2)
    fill(book, [0])
    book.seal(0, 0.0)
    book.retire(0)
    assert book.put(Ticket(0, 0), FIRST, 1.0) is Outcome.STALE
    assert book.put(Ticket(0, 0), ["ref_logprobs"], 1.0) is Outcome.STALE
    assert book.accounts().dropped == {"stale": 2}
    assert book.exhausted("train", 0)
    with pytest.raises(ContractError, match="over"):
        take(book, 1)


def test_a_stall_names_ticket_engine_and_time() -> None:
    book = ledger(3, 2)
    fill(book, [0])
    book.assign(Ticket(0, 2), "rollout-1", 5.0)
    lease = take(book, 1)
    words = book.status(0, 65.0).blocker("train")
    assert "2 of 3 groups unfilled" in words
    assert "ticket 2 (attempt 0) on engine 'rollout-1' for 60.0 s" in words
    assert "ticket 1 (attempt 0) given to no engine for 65.0 s" in words
    assert "1 groups lent to me" in words
    assert lease is not None
    fill(book, [1, 2])
    take(book, 1, task="late", columns=("ref_logprobs",))
    assert "ref_logprobs in 3 groups" in book.status(0, 65.0).blocker("late")


def test_a_stall_of_generated_groups_is_not_blamed_on_their_engine() -> None:
    book = Ledger(2, 2, capacity=2, max_draws=2, settled_by=("responses", "rewards"))
    for place in range(2):
        book.assign(Ticket(0, place), "rollout-1", 5.0)
    book.put(Ticket(0, 0), ["responses"], 40.0)
    words = book.status(0, 65.0).blocker()
    assert "2 of 2 groups unfilled, 1 of them generated: " in words
    assert "ticket 0 (attempt 0) on engine 'rollout-1', generated, waits for rewards for 25.0 s" in words
    assert "ticket 1 (attempt 0) on engine 'rollout-1' for 60.0 s" in words
    book.put(Ticket(0, 0), ["rewards"], 66.0)
    assert "generated" not in book.status(0, 67.0).blocker()


def test_accounts_tell_where_every_sample_went() -> None:
    book = ledger(2, 2)
    fill(book, [0])
    book.drop(Ticket(0, 0), "all rewards equal", 1.0)
    fill(book, [1])
    told = "produced 4, trained 0, dropped 2 (2 all rewards equal), left in the queue 2"
    assert str(book.accounts()) == told
    with pytest.raises(ContractError, match="not conserved: produced 5, trained 0"):
        replace(book.accounts(), produced=5).check()


def test_what_an_ended_part_of_a_run_had_queued_is_dropped_there() -> None:
    part = Accounts(10, 4, 5, {"equal rewards": 1}).ended()
    part.check()
    assert part == Accounts(10, 4, 0, {"equal rewards": 1, "generated again after a resume": 5})
    both = part + Accounts(6, 5, 0, {"equal rewards": 1})
    both.check()
    assert both == Accounts(16, 9, 0, {"equal rewards": 2, "generated again after a resume": 5})


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda book: book.put(Ticket(0, 0), ["ref_logprobs"], 0.0), "before 'responses'"),
        (lambda book: book.put(Ticket(0, 9), FIRST, 0.0), "tickets 0 to 3"),
        (lambda book: book.put(Ticket(0, 0, 1), FIRST, 0.0), "attempt 0 is due"),
        (lambda book: book.retire(0), "isn't sealed"),
        (lambda book: take(book, 0), "at least 1 group"),
        (lambda book: (take(book, 1), take(book, 1, columns=("rewards",))), "another task name"),
        (lambda book: ledger(4, capacity=3), "capacity 3"),
        (lambda book: book.load_state_dict(ledger(5).state_dict(), 0.0), "another|shape"),
    ],
)
def test_misuse_is_named(broken: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        broken(ledger())
