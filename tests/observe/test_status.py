"""What a run says of itself comes out as it went in, and whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.base.errors import DataError
from tandem.observe.status.status import Doing, EngineLine, PartitionLine, Status, Wait

COUNTS = st.integers(0, 99)
WORDS = st.text(max_size=8)
TICKETS = st.lists(st.tuples(COUNTS, COUNTS, COUNTS).map(list), max_size=3)
TASKS = st.dictionaries(WORDS, st.tuples(COUNTS, COUNTS, COUNTS).map(list), max_size=2)
DROPPED = st.dictionaries(WORDS, COUNTS, max_size=2)
STATUSES = st.builds(
    Status,
    COUNTS,
    COUNTS,
    st.lists(st.builds(Doing, WORDS, st.floats(0, 9)), max_size=2),
    st.lists(
        st.builds(
            PartitionLine, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, st.booleans(), TASKS, DROPPED, st.lists(WORDS)
        ),
        max_size=2,
    ),
    st.lists(st.builds(EngineLine, WORDS, WORDS, st.none() | COUNTS, TICKETS), max_size=2),
    st.dictionaries(WORDS, WORDS, max_size=2),
    st.lists(st.builds(Wait, WORDS, WORDS, st.none() | st.floats(0, 9)), max_size=2),
)


@settings(max_examples=30)
@given(STATUSES)
def test_a_status_survives_its_way(status: Status) -> None:
    assert Status.of_json(json.loads(json.dumps(status.to_json()))) == status


@settings(max_examples=30)
@given(STATUSES)
def test_every_engine_role_wait_and_partition_has_a_line(status: Status) -> None:
    lines = list(status.lines())
    for engine in status.engines:
        assert any(line.startswith(f"engine {engine.name}: {engine.state}, ") for line in lines)
    for wait in status.waits:
        assert any(line.startswith(f"{wait.who} waits") and line.endswith(wait.cause) for line in lines)
    for partition in status.partitions:
        head = f"partition {partition.partition}: {partition.filled} of {partition.tickets} groups filled"
        assert any(line.startswith(head) for line in lines)
    assert all(f"role {name}: {state}" in lines for name, state in status.roles.items())
    assert ("nobody waits" in lines) == (not status.waits)


def test_what_another_version_answers_is_refused() -> None:
    with pytest.raises(DataError, match=r"in another form \('tandem-status/9'\)"):
        Status.of_json({"format": "tandem-status/9"})
