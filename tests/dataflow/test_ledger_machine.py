"""The ledger as a state machine: no history loses a sample, counts one twice, or lends one twice to a task."""

from __future__ import annotations

import json
from collections import Counter
from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from tandem.base.errors import ContractError
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.progress import Outcome
from tandem.dataflow.tickets import Lease, Request, Ticket

FIRST = ("responses", "rollout_logprobs")


TASKS = {"ref": ("responses",), "train": ("responses", "ref_logprobs")}
LEASE_SECONDS = 10.0


class LedgerMachine(RuleBasedStateMachine):
    """Random work on a few partitions, against counts kept by hand.

    Invariants: produced = trained + queued + dropped; a task never consumes a group twice, never consumes a dropped
    one, and has consumed every group of a partition when it says so; the capacity is kept.
    """

    leases = Bundle("leases")

    @initialize(tickets=st.integers(1, 3), samples=st.integers(1, 3), extra=st.integers(0, 4))
    def start(self, tickets: int, samples: int, extra: int) -> None:
        self.book = Ledger(tickets, samples, capacity=tickets + extra, max_draws=10**6)
        self.now = 0.0
        self.drawn = 0  # samples that were produced, counted by hand
        self.trained = 0
        self.alive: set[tuple[int, int]] = set()  # places whose group is there
        self.attempts: Counter[tuple[int, int]] = Counter()
        self.consumed: dict[str, set[Ticket]] = {task: set() for task in TASKS}
        self.first = 0

    def ticket(self, ahead: int, place: int) -> Ticket:
        number, place = self.first + ahead % 2, place % self.book.tickets
        return Ticket(number, place, self.attempts[number, place])

    def put(self, ticket: Ticket) -> None:
        """Put a group, and count its samples by hand."""
        if self.book.put(ticket, FIRST, self.now) is not Outcome.FULL:
            self.drawn += self.book.samples
            self.alive.add(ticket[:2])

    @rule(ahead=st.integers(0, 1), place=st.integers(0, 3))
    def put_group(self, ahead: int, place: int) -> None:
        self.put(self.ticket(ahead, place))

    @rule(ahead=st.integers(0, 1))
    def put_all_open(self, ahead: int) -> None:
        for ticket in self.book.open_tickets(self.first + ahead, self.now):
            self.put(ticket)

    @rule(ahead=st.integers(0, 1), place=st.integers(0, 3))
    def drop_group(self, ahead: int, place: int) -> None:
        ticket = self.ticket(ahead, place)
        self.drawn += 0 if ticket[:2] in self.alive else self.book.samples
        self.alive.discard(ticket[:2])
        assert self.book.drop(ticket, "filtered", self.now) is Outcome.DROPPED
        self.attempts[ticket[:2]] += 1

    @rule(target=leases, task=st.sampled_from(sorted(TASKS)), count=st.integers(1, 3), canonical=st.booleans())
    def take(self, task: str, count: int, canonical: bool) -> Lease | None:
        order: Literal["arrival", "canonical"] = "canonical" if canonical else "arrival"
        lease = self.book.take(Request(task, TASKS[task], count, order=order), now=self.now, seconds=LEASE_SECONDS)
        if lease is not None:
            assert len({ticket.partition for ticket in lease.tickets}) == 1
            assert not self.consumed[task] & set(lease.tickets)
        return lease

    @rule(lease=leases)
    def answer(self, lease: Lease | None) -> None:
        """A stage adds its column, perhaps twice, perhaps late: that never produces a sample."""
        for ticket in lease.tickets if lease else ():
            if self.book.holds(ticket):
                self.book.put(ticket, ["ref_logprobs"], self.now)

    @rule(lease=consumes(leases))
    def acknowledge(self, lease: Lease | None) -> None:
        if lease is None:
            return
        current = [ticket for ticket in lease.tickets if self.book.holds(ticket)]
        before = self.book.state_dict()["partitions"].get(str(lease.partition), {"consumed": {}})["consumed"]
        try:
            self.book.acknowledge(lease, self.now)
        except ContractError:
            return  # expired, or the partition is over
        after = self.book.state_dict()["partitions"][str(lease.partition)]["consumed"][lease.task]
        gained = set(after) - set(before.get(lease.task, []))
        assert gained <= {ticket.place for ticket in current}
        for ticket in current:
            if ticket.place in gained:
                assert ticket not in self.consumed[lease.task]
                self.consumed[lease.task].add(ticket)

    @rule(lease=consumes(leases))
    def give_back(self, lease: Lease | None) -> None:
        if lease is not None:
            self.book.give_back(lease)

    @rule(seconds=st.sampled_from([1.0, LEASE_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.first in self.book.live_partitions())
    @rule()
    def train(self) -> None:
        """Seal and retire the first partition if it is whole."""
        if not self.book.seal(self.first, self.now):
            return
        current = {Ticket(self.first, i, self.attempts[self.first, i]) for i in range(self.book.tickets)}
        for task, seen in self.consumed.items():
            if self.book.exhausted(task, self.first):
                assert current <= seen
        self.book.retire(self.first)
        self.trained += self.book.tickets * self.book.samples
        for place in range(self.book.tickets):
            self.alive.remove((self.first, place))
        self.first += 1

    @rule()
    def crash_and_restore(self) -> None:
        """Only JSON survives: leases are lost, all else stays."""
        state = json.loads(json.dumps(self.book.state_dict()))
        old = self.book
        self.book = Ledger(old.tickets, old.samples, capacity=old.capacity, max_draws=old.max_draws)
        self.book.load_state_dict(state, self.now)
        assert all(self.book.holds(Ticket(*key, self.attempts[key])) for key in self.alive)

    @invariant()
    def samples_are_conserved(self) -> None:
        accounts = self.book.accounts()
        accounts.check()
        assert accounts.produced == self.drawn
        assert accounts.trained == self.trained
        assert accounts.queued == len(self.alive) * self.book.samples

    @invariant()
    def capacity_is_kept(self) -> None:
        assert self.book.held <= self.book.capacity

    def teardown(self) -> None:
        """From wherever it stands, the run can be finished: every open ticket filled, every group consumed once."""
        if not hasattr(self, "book"):
            return
        self.now += LEASE_SECONDS
        for number in (self.first, self.first + 1):
            for ticket in self.book.open_tickets(number, self.now):
                assert self.book.put(ticket, FIRST, self.now) is Outcome.STORED
            for place in range(self.book.tickets):
                self.book.put(Ticket(number, place, self.attempts[number, place]), ["ref_logprobs"], self.now)
            for task, columns in TASKS.items():
                request = Request(task, columns, 2, number, "canonical")
                while lease := self.book.take(request, now=self.now, seconds=1.0):
                    assert not self.consumed[task] & set(lease.tickets)
                    self.book.acknowledge(lease, self.now)
                assert self.book.exhausted(task, number)
            assert self.book.seal(number, self.now)
            self.book.retire(number)
        assert self.book.accounts().queued == 0
        self.book.accounts().check()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
