"""More groups are begun than a partition needs: the first that are done are taken, and every one is accounted for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.base.errors import ContractError
from tandem.dataflow.gate import Closed, Gate
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.progress import Outcome
from tandem.dataflow.spares import Arrival, Spares
from tandem.dataflow.tickets import Ticket


def own(*places: int) -> list[Ticket]:
    return [Ticket(0, place) for place in places]


def arrivals(spares: Spares[str], tickets: list[Ticket]) -> list[Arrival[str]]:
    """Groups named by their tickets arrive one after the other."""
    return [spares.arrived(ticket, f"group {ticket.place}") for ticket in tickets]


def test_the_first_that_are_done_are_taken_in_the_order_of_the_places() -> None:
    spares = Spares[str](4, 2)
    found = arrivals(spares, own(2, 5, 0, 4))
    assert [arrival.placed for arrival in found[:3]] == [((Ticket(0, 2), "group 2"),), (), ((Ticket(0, 0), "group 0"),)]
    assert found[3].placed == ((Ticket(0, 1), "group 5"), (Ticket(0, 3), "group 4"))
    assert found[3].cancelled == (Ticket(0, 1), Ticket(0, 3))
    assert [spares.wants(ticket) for ticket in own(1, 3, 4, 5)] == [False] * 4
    assert arrivals(spares, own(1))[0] == Arrival(late=True)


def test_without_a_spare_one_that_is_done_the_spare_ones_are_cancelled() -> None:
    spares = Spares[str](2, 2)
    first, last = arrivals(spares, own(1, 0))
    assert (first.cancelled, last.cancelled) == ((), (Ticket(0, 2), Ticket(0, 3)))
    assert not spares.wants(Ticket(0, 3)) and spares.wants(Ticket(1, 3))


def test_a_spare_group_fills_the_place_of_one_that_was_dropped() -> None:
    spares = Spares[str](2, 1)
    arrivals(spares, own(0))
    spares.reopened(Ticket(0, 0))
    arrivals(spares, own(2))
    found = spares.arrived(Ticket(0, 1), "group 1")
    assert found.placed == ((Ticket(0, 1), "group 1"), (Ticket(0, 0, 1), "group 2"))
    assert found.cancelled == (Ticket(0, 0, 1),)
    spares.reopened(Ticket(0, 0, 1))  # the partition has had all its groups: drawn anew as without spares
    assert spares.arrived(Ticket(0, 0, 2), "again").placed == ((Ticket(0, 0, 2), "again"),)


def test_a_group_that_two_engines_deliver_is_held_once() -> None:
    spares = Spares[str](2, 1)
    assert [arrival.placed for arrival in arrivals(spares, own(2, 2))] == [(), ()]
    assert arrivals(spares, own(1))[0].placed == ((Ticket(0, 1), "group 1"), (Ticket(0, 0), "group 2"))


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(ContractError, match="spare=0"):
        Spares[str](2, 0)


@dataclass
class World:
    """Engines over the real gate, ledger and spares. Counts are of groups."""

    tickets: int
    spare: int
    staleness: int
    steps: int
    spares: Spares[Ticket] = field(init=False)
    in_hand: dict[str, list[Ticket]] = field(default_factory=dict)
    asked: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    done: list[Ticket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spares = Spares(self.tickets, self.spare)
        begun = self.tickets + self.spare
        room = self.tickets * (self.staleness + 1)
        self.gate = Gate(begun, self.staleness, last=self.steps, capacity=begun * (self.staleness + 1))
        self.ledger = Ledger(self.tickets, 1, capacity=room, max_draws=100)
        self.trained = 0

    def join(self, name: str) -> None:
        self.in_hand[name] = []
        self.gate.join(name)
        self.gate.acknowledge(name, self.trained)

    def ask(self, name: str) -> bool:
        while not isinstance(ticket := self.gate.admit(name), Closed):
            if not self.spares.wants(ticket):
                self.gate.done(ticket)
                continue
            assert ticket.partition - self.trained <= self.staleness
            self.in_hand[name].append(ticket)
            self.asked += 1
            return True
        return False

    def finish(self, name: str, place: int, drop: bool) -> None:
        ticket = self.in_hand[name].pop(place)
        if not self.spares.wants(ticket):  # word of it has not come to the engine
            self.counts["cancelled"] += self.spares.arrived(ticket, ticket).late
            return
        arrival = self.spares.arrived(ticket, ticket)
        assert not arrival.late
        if self.spares.is_spare(ticket):
            self.gate.done(ticket)
        for cancelled in arrival.cancelled:
            if self.spares.is_spare(cancelled):
                self.gate.done(cancelled)
        for number, (filled, group) in enumerate(arrival.placed):
            if filled != group:
                self.gate.take_over(filled, name)
            assert self.ledger.put(filled, {"responses"}, 0.0) is Outcome.STORED
            if drop and number == 0:
                self.ledger.drop(filled, "equal rewards", 0.0)
                self.counts["failed"] += 1
                self.spares.reopened(filled)
                self.gate.redraw(filled)
            else:
                self.gate.done(filled)

    def die(self, name: str) -> None:
        """Its groups are begun anew by others, those that nobody wants by nobody."""
        lost = self.gate.leave(name)
        assert all(self.spares.wants(ticket) for ticket in lost)
        self.counts["cancelled"] += len(self.in_hand[name]) - len(lost)
        self.asked -= len(lost)
        self.join_again(name)

    def join_again(self, name: str) -> None:
        del self.in_hand[name]
        self.join(name)

    def train(self) -> None:
        while self.trained < self.steps and self.ledger.seal(self.trained, 0.0):
            self.ledger.retire(self.trained)
            self.trained += 1
            for name in self.in_hand:
                self.gate.acknowledge(name, self.trained)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_group_that_was_asked_for_is_trained_cancelled_or_failed(data: st.DataObject) -> None:
    world = World(
        tickets=data.draw(st.integers(1, 5)),
        spare=data.draw(st.integers(1, 4)),
        staleness=data.draw(st.integers(0, 2)),
        steps=3,
    )
    names = ["a", "b"][: data.draw(st.integers(1, 2))]
    for name in names:
        world.join(name)
    chance = data.draw(st.randoms(use_true_random=False))
    drops, deaths = data.draw(st.sampled_from([0.0, 0.3])), data.draw(st.sampled_from([0.0, 0.05]))
    for _ in range(2000):
        name = chance.choice(names)
        held = world.in_hand[name]
        if chance.random() < deaths:
            world.die(name)
        elif held and (chance.random() < 0.5 or not world.ask(name)):
            world.finish(name, chance.randrange(len(held)), chance.random() < drops)
        elif not held:
            world.ask(name)
        world.train()
        if world.trained == world.steps and not any(world.in_hand.values()):
            break
    assert world.trained == world.steps
    for name in names:  # what was never begun is not any more
        assert not world.ask(name)
    assert not any(world.in_hand.values())
    world.ledger.accounts().check()
    trained = world.ledger.accounts().trained
    assert trained == world.steps * world.tickets
    assert world.asked == trained + world.counts["cancelled"] + world.counts["failed"]
