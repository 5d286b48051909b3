"""Tickets are begun in the order of their expected lengths, and each exactly once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.dataflow.dispatch import LengthHistory, longest_first

KNOWN = st.lists(st.none() | st.floats(0, 1e6), min_size=1, max_size=9)


@given(KNOWN)
def test_every_place_is_given_once_and_longer_ones_first(lengths: list[float | None]) -> None:
    order = longest_first(lambda place: lengths[place], lambda partition, place: place, len(lengths))(3)  # type: ignore[call-overload]
    known = [length for length in lengths if length is not None]
    average = sum(known) / len(known) if known else 0.0
    expected = [average if (length := lengths[place]) is None else length for place in order]
    assert sorted(order) == list(range(len(lengths)))
    assert expected == sorted(expected, reverse=True)
    assert all(a < b for a, b in pairwise(order) if lengths[a] == lengths[b])


def test_without_any_history_the_order_is_that_of_the_draws() -> None:
    assert longest_first(LengthHistory().predicted, lambda partition, place: place, 4)(0) == [0, 1, 2, 3]


def test_what_a_partition_asks_for_is_its_own_prompts() -> None:
    history = LengthHistory()
    for prompt, length in enumerate([1.0, 5.0, 9.0, 3.0]):
        history.note(prompt, length)
    order = longest_first(history.predicted, lambda partition, place: 2 * partition + place, 2)
    assert (order(0), order(1), order(7)) == ([1, 0], [0, 1], [0, 1])


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=4))
def test_few_lengths_are_averaged(lengths: list[float]) -> None:
    history = LengthHistory()
    for length in lengths:
        history.note("prompt", length)
    assert history.predicted("prompt") == pytest.approx(sum(lengths) / len(lengths))
    assert history.predicted("another") is None


def test_what_was_long_ago_is_forgotten() -> None:
    history = LengthHistory()
    for length in [100.0] * 50 + [10.0] * 20:
        history.note("prompt", length)
    assert history.predicted("prompt") == pytest.approx(10.0, abs=0.5)
