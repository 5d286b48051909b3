"""The in-process store: the cases of every store, and that it copies nothing and frees what it should."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from tandem.base.errors import ContractError
from tandem.dataflow.progress import Outcome
from tandem.dataflow.store import LocalStore
from tandem.dataflow.tickets import Ticket
from tests.dataflow.store_cases import COLUMNS, MakeStore, StoreCases, check_rows, fill, group, ledger, take


def store(tickets: int = 4, samples: int = 2, *, lease_seconds: float = 60.0, **options: Any) -> LocalStore:
    return LocalStore(ledger(tickets, samples, **options), lease_seconds)


@pytest.fixture(scope="module", name="store")
def make_store() -> MakeStore:
    return store


class TestLocalStore(StoreCases):
    """On threads of one process."""


def test_a_put_copies_nothing_and_neither_does_a_get_of_neighbours() -> None:
    plane = store(4)
    tickets = [Ticket(0, place) for place in range(4)]
    data = group(*tickets)
    plane.put(tickets, data, timeout=0)
    whole = plane.get(tickets, ["responses", "rewards"])
    assert whole.ragged("responses") is data.ragged("responses")
    middle = plane.get(tickets[1:3], ["rewards"]).dense("rewards")
    assert middle.data_ptr() == data.dense("rewards")[2:].data_ptr()


def test_a_dropped_partition_frees_its_memory() -> None:
    plane = store(2)
    fill(plane, 2)
    fill(plane, 2, partition=1)
    lease = take(plane, 2)
    watched = [weakref.ref(plane.get([ticket], ["rewards"]).dense("rewards")) for ticket in lease.tickets]
    kept = weakref.ref(plane.get([Ticket(1, 0)], ["rewards"]).dense("rewards"))
    assert all(ref() is not None for ref in watched)
    plane.seal(0, timeout=0)
    plane.drop(0)
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    assert kept() is not None
    with pytest.raises(ContractError, match="holds no group"):
        plane.get(lease.tickets, ["rewards"])


def test_a_dropped_group_frees_its_memory() -> None:
    plane = store(1)
    fill(plane, 1)
    watched = weakref.ref(plane.get([Ticket(0, 0)], ["rewards"]).dense("rewards"))
    assert plane.drop(Ticket(0, 0), "filtered") is Outcome.DROPPED
    gc.collect()
    assert watched() is None
    assert plane.put([Ticket(0, 0, 1)], group(Ticket(0, 0, 1)), timeout=0) == [Outcome.STORED]
    check_rows(plane.get([Ticket(0, 0, 1)], COLUMNS), (Ticket(0, 0, 1),))
