"""The lag of consumed data: gate and ledger together, under random latencies, drops, deaths, slow publications."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.dataflow.gate import Gate
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.tickets import Lease, Request, Ticket

PARTITIONS, SAMPLES, COLUMNS = 5, 2, ("responses", "rewards")
ON_UPDATE = ("wait", "keep", "resume", "discard")


@dataclass
class RunningBatch:
    """A group that is generated: the versions of its oldest and of its newest token."""

    engine: str
    ticket: Ticket
    oldest: int
    newest: int


@dataclass
class World:
    """A run, one random event at a time. An engine takes new weights as ``on_update`` says."""

    staleness: int
    tickets: int
    sub_batches: int
    on_update: str
    chance: random.Random
    versions: dict[str, int] = field(default_factory=dict)  # engine -> weights it generates with
    flights: list[RunningBatch] = field(default_factory=list)
    scoring: list[RunningBatch] = field(default_factory=list)
    stored: dict[Ticket, RunningBatch] = field(default_factory=dict)
    lease: Lease | None = None
    trained: dict[Ticket, RunningBatch] = field(default_factory=dict)
    step: int = 0
    names: int = 0

    def __post_init__(self) -> None:
        order = self.permuted if self.chance.random() < 0.5 else None
        self.gate = Gate(self.tickets, self.staleness, last=PARTITIONS, order=order)
        capacity = self.tickets * (self.staleness + 1)
        self.ledger = Ledger(self.tickets, SAMPLES, capacity=capacity, max_draws=99, settled_by=COLUMNS)

    def permuted(self, partition: int) -> list[int]:
        """Any order in which the tickets of a partition may be given."""
        return self.chance.sample(range(self.tickets), self.tickets)

    # --- engines -----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """A late joiner may have loaded what was new a while ago."""
        name, self.names = f"engine-{self.names}", self.names + 1
        self.gate.join(name)
        self.versions[name] = max(0, self.step - self.chance.randrange(2))
        self.gate.acknowledge(name, self.versions[name])

    def die(self) -> None:
        """Its tickets are given again under the same attempt, but for those whose groups are only being scored."""
        name = self.chance.choice(sorted(self.versions))
        del self.versions[name]
        generated = [flight.ticket for flight in self.scoring if flight.engine == name]
        lost = sorted(flight.ticket for flight in self.flights if flight.engine == name)
        assert self.gate.leave(name, generated) == lost
        self.flights = [flight for flight in self.flights if flight.engine != name]
        if not self.versions:
            self.join()

    def admit(self) -> None:
        name = self.chance.choice(sorted(self.versions))
        ticket = self.gate.admit(name)
        if isinstance(ticket, Ticket):
            self.ledger.assign(ticket, name, 0.0)
            self.flights.append(RunningBatch(name, ticket, self.versions[name], self.versions[name]))

    def token(self) -> None:
        """A running generation draws a token from the weights that its engine has now."""
        if self.flights:
            flight = self.chance.choice(self.flights)
            flight.newest = self.versions[flight.engine]

    def push(self) -> None:
        """The next version reaches one engine; the push after it begins when all have this one."""
        oldest = min(self.versions.values())
        if oldest == self.step:
            return
        name = self.chance.choice(sorted(name for name, version in self.versions.items() if version == oldest))
        own = [flight for flight in self.flights if flight.engine == name]
        if self.on_update == "wait" and own:
            self.gate.pause(name, "it finishes what it has")
            return
        self.versions[name] += 1
        self.gate.acknowledge(name, self.versions[name])
        self.gate.resume(name)
        if self.on_update == "discard":
            for flight in own:
                flight.oldest = flight.newest = self.versions[name]

    # --- groups ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        if self.flights:
            flight = self.flights.pop(self.chance.randrange(len(self.flights)))
            self.token_of(flight)
            self.ledger.put(flight.ticket, ["responses"], 0.0)
            self.scoring.append(flight)

    def token_of(self, flight: RunningBatch) -> None:
        """The last token of a group."""
        flight.newest = self.versions[flight.engine]

    def score(self, drop_rate: float) -> None:
        if not self.scoring:
            return
        flight = self.scoring.pop(self.chance.randrange(len(self.scoring)))
        if self.chance.random() < drop_rate:
            self.ledger.drop(flight.ticket, "equal rewards", 0.0)
            self.gate.redraw(flight.ticket)
            return
        self.ledger.put(flight.ticket, ["rewards"], 0.0)
        self.gate.done(flight.ticket)
        self.stored[flight.ticket] = flight

    # --- the actor ---------------------------------------------------------------------------------------------------

    def consume(self, death_rate: float) -> None:
        """Take a sub-batch, or finish the one in hand; a consumer that dies gives it back."""
        if self.lease is None:
            count = self.tickets // self.sub_batches
            self.lease = self.ledger.take(Request("train", COLUMNS, count, self.step), now=0.0, seconds=9.0)
            return
        lease, self.lease = self.lease, None
        if self.chance.random() < death_rate:
            self.ledger.give_back(lease)
            return
        self.ledger.acknowledge(lease, 0.0)
        for ticket in lease.tickets:
            assert (ticket.partition, ticket.place) not in {(t.partition, t.place) for t in self.trained}
            self.trained[ticket] = self.stored.pop(ticket)
        if self.ledger.exhausted("train", self.step):
            assert self.ledger.seal(self.step, 0.0)
            self.ledger.retire(self.step)
            self.step += 1

    def run(self, drop_rate: float, death_rate: float, speeds: list[int]) -> None:
        actions: list[Callable[[], None]] = [
            self.admit, self.token, self.finish, lambda: self.score(drop_rate), lambda: self.consume(death_rate),
            self.push,
        ]  # fmt: skip
        for _ in range(30_000):
            if self.step == PARTITIONS:
                return
            if self.chance.random() < death_rate:
                self.chance.choice([self.die, self.join])()
            self.chance.choices(actions, weights=speeds)[0]()
        pytest.fail(f"no end: {self}")


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@settings(max_examples=130, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    tickets=st.sampled_from([1, 2, 4, 6]),
    slices=st.sampled_from([1, 2]),
    engines=st.integers(1, 4),
    on_update=st.sampled_from(ON_UPDATE),
    drop_rate=st.sampled_from([0.0, 0.3]),
    death_rate=st.sampled_from([0.0, 0.01]),
    speeds=st.lists(st.integers(1, 20), min_size=6, max_size=6),
)
def test_consumed_lag_is_bounded_and_every_sample_accounted_for(
    staleness: int,
    seed: int,
    tickets: int,
    slices: int,
    engines: int,
    on_update: str,
    drop_rate: float,
    death_rate: float,
    speeds: list[int],
) -> None:
    world = World(staleness, tickets, slices if tickets % slices == 0 else 1, on_update, random.Random(seed))
    for _ in range(engines):
        world.join()
    world.run(drop_rate, death_rate, speeds)
    assert sorted((t.partition, t.place) for t in world.trained) == [
        (k, place) for k in range(PARTITIONS) for place in range(tickets)
    ]
    for ticket, flight in world.trained.items():
        assert 0 <= ticket.partition - flight.oldest <= staleness
        assert flight.newest >= flight.oldest
        assert flight.newest == flight.oldest or on_update in ("keep", "resume")
        assert flight.newest <= ticket.partition  # no token is of weights that the step has yet to make
    accounts = world.ledger.accounts()
    accounts.check()
    assert accounts.trained == PARTITIONS * tickets * SAMPLES
