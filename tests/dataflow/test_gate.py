"""The staleness gate: the bound under random schedules, and why it is closed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.base.errors import ContractError
from tandem.dataflow.gate import Closed, Gate
from tandem.dataflow.tickets import Ticket


def gate(tickets: int = 2, max_staleness: int = 0, *, engines: dict[str, int] | None = None, **options: Any) -> Gate:
    made = Gate(tickets, max_staleness, **options)
    for engine, version in (engines if engines is not None else {"a": 0}).items():
        made.join(engine)
        made.acknowledge(engine, version)
    return made


def admitted(one: Gate, engine: str = "a") -> list[Ticket]:
    tickets = []
    while isinstance(ticket := one.admit(engine), Ticket):
        tickets.append(ticket)
    return tickets


def closed(one: Gate, engine: str = "a") -> Closed:
    answer = one.admit(engine)
    assert isinstance(answer, Closed)
    return answer


def test_the_last_word_of_an_engine_that_died_changes_nothing() -> None:
    """The transfer of weights is in a thread of its own: it may end just after the loop of the engine did."""
    one = gate(2, 1)
    one.leave("a")
    one.acknowledge("a", 1)
    one.pause("a", "it finishes what it has")
    assert one.published == 0
    one.join("a")
    assert "has loaded no weights" in str(one.closed("a"))
    with pytest.raises(ContractError, match="'b' is unknown"):
        one.acknowledge("b", 1)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_b42_staleness_s_admits_s_plus_one_partitions_and_not_one_more(staleness: int) -> None:
    one = gate(2, staleness)
    assert admitted(one) == [Ticket(k, place) for k in range(staleness + 1) for place in range(2)]
    one.acknowledge("a", 1)
    assert admitted(one) == [Ticket(staleness + 1, place) for place in range(2)]


@pytest.mark.parametrize(
    ("capacity", "first", "after_one"),
    [(2, 2, 2), (3, 3, 2), (5, 5, 2), (6, 6, 2), (99, 6, 2)],
)
def test_no_more_groups_are_begun_than_will_have_a_place(capacity: int, first: int, after_one: int) -> None:
    """Partitions of 2; staleness 2 admits 6 groups. What was trained makes room when its version is published."""
    one = gate(2, 2, capacity=capacity)
    assert len(admitted(one)) == first
    one.acknowledge("a", 1)
    assert len(admitted(one)) == after_one


def test_a_gate_closed_for_want_of_room_says_so() -> None:
    one = gate(2, 2, capacity=3)
    admitted(one)
    assert (str(closed(one)), closed(one).awaited_version) == (
        "partition 1 needs version 1 published (room for 3 groups), 0 is; awaited from a",
        1,
    )
    with pytest.raises(ContractError, match="can't hold one partition of 2"):
        Gate(2, 2, capacity=1)


def test_b48_the_gate_waits_for_the_publication_not_for_the_trainer() -> None:
    """With s = 0 nothing of partition 1 starts before *every* engine has version 1, and then it does."""
    one = gate(1, 0, engines={"a": 0, "b": 0})
    admitted(one)
    one.acknowledge("a", 1)
    why = closed(one)
    assert why.awaited_version == 1
    assert why.awaited_from == ("b",)
    assert "partition 1 needs version 1 published (max_staleness 0), 0 is; awaited from b" in str(why)
    assert one.published == 0
    one.acknowledge("b", 1)
    assert one.published == 1
    assert admitted(one, "b") == [Ticket(1, 0)]


def test_fresh_tickets_are_dealt_evenly_and_refills_to_whoever_asks() -> None:
    one = Gate(8, 0, even=True)
    for engine in ("a", "b"):
        one.join(engine)
        one.acknowledge(engine, 0)
    first = admitted(one)
    assert len(first) == 1
    assert "has 1 tickets in hand, others have fewer" in str(closed(one))
    assert len(admitted(one, "b")) == 2
    one.redraw(first[0])
    one.admit("a")
    assert one.admit("a") == Ticket(0, 3)  # b has 2 in hand, so a is behind again
    refill = one.redraw(Ticket(0, 1))
    assert one.admit("a") == refill  # though it has more in hand than b
    one.pause("b", "a weight update")
    assert len(admitted(one)) == 4  # who is paused keeps nobody waiting
    one.resume("b")


def test_a_dead_engine_keeps_the_groups_that_only_lack_their_rewards() -> None:
    one = gate(3, 0, engines={"a": 0, "b": 0})
    generated, lost = one.admit("a"), one.admit("a")
    assert isinstance(generated, Ticket)
    assert one.leave("a", {generated}) == [lost]
    assert admitted(one, "b") == [lost, Ticket(0, 2)]
    assert admitted(one, "b") == []
    assert one.redraw(generated) == Ticket(0, 0, 1)
    assert admitted(one, "b") == [Ticket(0, 0, 1)]


def test_the_death_of_the_slowest_engine_opens_the_gate_and_returns_its_tickets() -> None:
    one = gate(2, 0, engines={"a": 0, "b": 0})
    mine = one.admit("a")
    its = one.admit("b")
    assert (mine, its) == (Ticket(0, 0), Ticket(0, 1))
    one.acknowledge("a", 1)
    assert one.leave("b") == [its]
    assert one.published == 1
    assert admitted(one) == [Ticket(0, 1), Ticket(1, 0), Ticket(1, 1)]  # the same attempt again, and first


def test_a_late_joiner_loads_first_and_lowers_nothing() -> None:
    one = gate(1, 0, engines={"a": 3}, first=3)
    one.join("late")
    assert closed(one, "late").awaited_from == ("late",)
    one.acknowledge("late", 2)
    assert one.published == 3
    assert "engine 'late' is at version 2, partition 3 needs 3" in str(closed(one, "late"))
    assert admitted(one, "a") == [Ticket(3, 0)]


def test_a_paused_engine_says_why() -> None:
    one = gate()
    one.pause("a", "health check failed")
    assert "'a' is paused: health check failed" in str(closed(one))
    one.resume("a")
    assert len(admitted(one)) == 2


def test_a_refill_is_the_next_attempt_and_comes_first() -> None:
    one = gate(2, 1)
    first, second, third = (one.admit("a") for _ in range(3))
    assert isinstance(second, Ticket)
    one.done(second)
    assert one.redraw(second) == Ticket(0, 1, 1)  # filtered after it was stored
    assert admitted(one) == [Ticket(0, 1, 1), Ticket(1, 1)]
    assert first == Ticket(0, 0)
    assert third == Ticket(1, 0)


def test_a_ticket_delivered_by_an_engine_given_up_is_not_given_again() -> None:
    one = gate(1, 0, engines={"a": 0, "b": 0})
    ticket = one.admit("a")
    assert isinstance(ticket, Ticket)
    one.leave("a")
    one.done(ticket)  # it delivered after all
    assert closed(one, "b").awaited_version == 1
    assert one.redraw(ticket) == Ticket(0, 0, 1)
    assert admitted(one, "b") == [Ticket(0, 0, 1)]


def test_a_run_has_a_last_partition() -> None:
    one = gate(1, 4, last=2)
    tickets = admitted(one)
    assert tickets == [Ticket(0, 0), Ticket(1, 0)]
    assert closed(one).exhausted
    one.give_back(tickets[0])
    assert admitted(one) == [tickets[0]]


def test_tickets_are_given_in_the_order_that_is_asked_for_when_the_first_is_due() -> None:
    orders, asked = {0: [1, 0, 2], 1: [2, 1, 0]}, []

    def order(partition: int) -> list[int]:
        asked.append(partition)
        return orders[partition]

    one = gate(3, 0, last=2, order=order)
    assert one.admit("a") == Ticket(0, 1) and asked == [0]
    one.give_back(Ticket(0, 1))
    assert admitted(one) == [Ticket(0, 1), Ticket(0, 0), Ticket(0, 2)] and asked == [0]
    one.acknowledge("a", 1)
    assert admitted(one) == [Ticket(1, 2), Ticket(1, 1), Ticket(1, 0)] and asked == [0, 1]


def test_an_order_that_leaves_a_place_out_is_refused() -> None:
    with pytest.raises(ContractError, match=r"\[0, 0\] is no order of the places 0 to 1"):
        gate(2, order=lambda partition: [0, 0]).admit("a")


def test_open_tickets_of_an_earlier_life_come_first() -> None:
    left = [Ticket(5, 1, 3), Ticket(4, 0)]
    one = gate(2, 2, first=6, engines={"a": 4}, open_tickets=left)
    assert admitted(one) == [Ticket(4, 0), Ticket(5, 1, 3), Ticket(6, 0), Ticket(6, 1)]
    with pytest.raises(ContractError, match="given twice"):
        gate(2, 2, first=5, open_tickets=left)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda one: one.admit("z"), "unknown to the gate"),
        (lambda one: one.join("a"), "leaves first"),
        (lambda one: (one.acknowledge("a", 2), one.acknowledge("a", 1)), "only grow"),
        (lambda one: one.give_back(Ticket(0, 0)), "isn't out"),
        (lambda one: gate(2, -1), "max_staleness=-1"),
    ],
)
def test_misuse_is_named(broken: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        broken(gate())


PARTITIONS = 6


@dataclass
class Run:
    """A whole run with fake engines: one random event at a time, weights pushed one version at a time."""

    gate: Gate
    tickets: int
    staleness: int
    chance: random.Random
    versions: dict[str, int] = field(default_factory=dict)  # engine -> weights it generates with
    generating: list[tuple[str, Ticket, int]] = field(
        default_factory=list
    )  # engine, ticket, version at its first token
    filled: dict[int, dict[int, int]] = field(default_factory=dict)  # partition -> place -> oldest version
    lags: Counter[int] = field(default_factory=Counter)
    trained: int = 0
    names: int = 0
    capacity: int | None = None

    def add_engine(self) -> None:
        """A joiner may have loaded weights that are old by the time it is there."""
        name, self.names = f"engine-{self.names}", self.names + 1
        self.gate.join(name)
        self.versions[name] = max(0, self.trained - self.chance.randrange(3))
        self.gate.acknowledge(name, self.versions[name])

    def kill_engine(self) -> None:
        dead = self.chance.choice(sorted(self.versions))
        del self.versions[dead]
        held = sorted(ticket for engine, ticket, _ in self.generating if engine == dead)
        assert self.gate.leave(dead) == held
        self.generating = [entry for entry in self.generating if entry[0] != dead]
        if not self.versions:
            self.add_engine()

    def start(self) -> None:
        engine = self.chance.choice(sorted(self.versions))
        ticket = self.gate.admit(engine)
        if isinstance(ticket, Ticket):
            self.generating.append((engine, ticket, self.versions[engine]))
            held = sum(len(places) for partition, places in self.filled.items() if partition >= self.trained)
            assert self.capacity is None or held + len(self.generating) <= self.capacity
        elif not ticket.exhausted:
            assert ticket.awaited_version is not None
            assert ticket.awaited_version > min(self.versions.values())

    def finish(self, drop_rate: float) -> None:
        if not self.generating:
            return
        _, ticket, version = self.generating.pop(self.chance.randrange(len(self.generating)))
        if self.chance.random() < drop_rate:
            self.gate.redraw(ticket)
            return
        self.gate.done(ticket)
        places = self.filled.setdefault(ticket.partition, {})
        assert ticket.place not in places
        places[ticket.place] = version

    def push(self) -> None:
        """One engine gets the next version; the next push starts when all have this one. Running generations go on."""
        behind = sorted(engine for engine, version in self.versions.items() if version < self.trained)
        if behind:
            oldest = min(self.versions.values())
            engine = self.chance.choice([name for name in behind if self.versions[name] == oldest])
            self.versions[engine] += 1
            self.gate.acknowledge(engine, self.versions[engine])

    def train(self) -> None:
        places = self.filled.get(self.trained, {})
        if len(places) == self.tickets:
            self.lags.update(self.trained - version for version in places.values())
            self.trained += 1

    def go(self, drop_rate: float, death_rate: float, speeds: list[int]) -> None:
        actions = [self.start, lambda: self.finish(drop_rate), self.push, self.train]
        for _ in range(20_000):
            if self.trained == PARTITIONS:
                return
            if self.chance.random() < death_rate:
                self.chance.choice([self.kill_engine, self.add_engine])()
            self.chance.choices(actions, weights=speeds)[0]()
        pytest.fail(f"no end: {self}")


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@settings(max_examples=130, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    tickets=st.integers(1, 4),
    engines=st.integers(1, 3),
    spare=st.none() | st.integers(0, 4),
    drop_rate=st.sampled_from([0.0, 0.3]),
    death_rate=st.sampled_from([0.0, 0.02]),
    speeds=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    ordered=st.booleans(),
)
def test_b42_consumed_lag_is_bounded_in_every_schedule(
    staleness: int,
    seed: int,
    tickets: int,
    engines: int,
    spare: int | None,
    drop_rate: float,
    death_rate: float,
    speeds: list[int],
    ordered: bool,
) -> None:
    """Slow engines, slow pushes, drops, deaths, joiners: lag <= s on what is trained, never more groups than have room,
    and the run ends (B48), in whatever order the tickets of a partition are given."""
    capacity, orders = None if spare is None else tickets + spare, random.Random(seed)
    order = (lambda partition: orders.sample(range(tickets), tickets)) if ordered else None
    made = Gate(tickets, staleness, last=PARTITIONS, capacity=capacity, order=order)
    run = Run(made, tickets, staleness, random.Random(seed), capacity=capacity)
    for _ in range(engines):
        run.add_engine()
    run.go(drop_rate, death_rate, speeds)
    assert sum(run.lags.values()) == PARTITIONS * tickets
    assert set(run.lags) <= set(range(staleness + 1))  # never above s, and for s = 0 exactly the synchronous run


def test_the_bound_is_reached() -> None:
    """The gate doesn't hold back more than it must: with a slow trainer the lag becomes s."""
    run = Run(Gate(2, 2, last=PARTITIONS), 2, 2, random.Random(0))
    run.add_engine()
    run.go(0.0, 0.0, [50, 50, 1, 1])
    assert max(run.lags) == 2
