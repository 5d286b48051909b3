"""The stream of draws: nothing lost, nothing twice, and a resume anywhere goes on as if nothing had happened."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import DataError
from tandem.data.sampler import Sampler

sizes = st.integers(1, 12)
batches = st.lists(st.integers(1, 7), max_size=8)


@given(size=sizes, before=batches, after=batches, seed=st.integers(0, 9), epochs=st.none() | st.integers(1, 5))
def test_a_resume_at_any_position_goes_on_equally(
    size: int, before: list[int], after: list[int], seed: int, epochs: int | None
) -> None:
    first = Sampler(range(size), seed=seed, epochs=epochs)
    for count in before:
        first.take(count)
    second = Sampler(range(size), seed=seed, epochs=epochs)
    second.load_state_dict(first.state_dict())
    assert (second.drawn, second.remaining()) == (first.drawn, first.remaining())
    assert [second.take(count) for count in after] == [first.take(count) for count in after]


@given(size=sizes, batch=st.integers(1, 7), epochs=st.integers(1, 4), shuffle=st.booleans())
def test_each_item_once_per_epoch(size: int, batch: int, epochs: int, shuffle: bool) -> None:
    draws, drawn = Sampler(range(size), seed=3, epochs=epochs, shuffle=shuffle), []
    while draws.remaining():
        drawn += draws.take(batch)
    assert draws.take(batch) == []
    assert len(drawn) == size * epochs
    for epoch in range(epochs):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(size=sizes, first=batches, second=batches)
def test_the_order_does_not_depend_on_the_batches(size: int, first: list[int], second: list[int]) -> None:
    one, other = Sampler(range(size), seed=1), Sampler(range(size), seed=1)
    a = [item for count in first for item in one.take(count)]
    b = [item for count in second for item in other.take(count)]
    shorter = min(len(a), len(b))
    assert a[:shorter] == b[:shorter]


def test_epochs_and_seeds_have_their_own_orders() -> None:
    draws = Sampler(range(50), seed=1)
    orders = [tuple(draws.take(50)), tuple(draws.take(50)), tuple(Sampler(range(50), seed=2).take(50))]
    assert len(set(orders)) == 3
    assert tuple(range(50)) not in orders


def test_the_order_is_that_of_every_release() -> None:
    # A checkpoint outlives the packages it was written with: this order must never change.
    assert Sampler(range(6), seed=0).take(12) == [2, 4, 0, 5, 1, 3, 5, 0, 3, 2, 4, 1]


def test_b58_epochs_bound_the_draws() -> None:
    draws = Sampler(range(10), seed=0, epochs=2)
    assert draws.total_steps(4) == 5
    assert draws.total_steps(4, steps=3) == 3
    assert draws.total_steps(4, steps=99) == 5
    drawn = [item for _ in range(5) for item in draws.take(4)]
    assert Counter(drawn) == Counter(dict.fromkeys(range(10), 2))
    assert draws.remaining() == 0


def test_b67_resume_at_the_epoch_boundary_trains_the_next_epoch() -> None:
    first = Sampler(range(8), seed=0, epochs=2)
    start = [first.take(4), first.take(4)]
    resumed = Sampler(range(8), seed=0, epochs=2)
    resumed.load_state_dict(first.state_dict())
    assert (resumed.drawn, resumed.remaining()) == (8, 8)
    rest = [resumed.take(4), resumed.take(4)]
    assert resumed.take(4) == []
    assert sorted(i for batch in start + rest for i in batch) == sorted(list(range(8)) * 2)


def test_b68_draws_that_were_not_trained_are_drawn_again() -> None:
    first = Sampler(range(8), seed=5, epochs=1)
    trained = first.take(3)
    lost = first.take(2)  # drawn, generated, not trained when the run was killed
    resumed = Sampler(range(8), seed=5, epochs=1)
    resumed.load_state_dict(first.state_dict(rewind=2))
    rest = resumed.take(8)
    assert rest[:2] == lost
    assert sorted(trained + rest) == list(range(8))
    with pytest.raises(ValueError, match="only 5 items were drawn"):
        first.state_dict(rewind=6)


def test_refills_depend_on_their_place_only_and_move_nothing() -> None:
    plain, refilled = Sampler(range(40), seed=7), Sampler(range(40), seed=7)
    places = [(p, t, a) for p in range(3) for t in range(4) for a in (1, 2)]
    refills = [refilled.refill(*place) for place in places]
    assert refilled.take(40) == plain.take(40)
    assert [plain.refill(*place) for place in reversed(places)] == refills[::-1]
    assert len(set(refills)) > 10


@pytest.mark.parametrize(
    "changed", [{"seed": 1}, {"size": 9}, {"shuffle": False}, {"fingerprint": "other"}], ids=lambda c: next(iter(c))
)
def test_a_state_of_other_data_is_refused(changed: dict[str, object]) -> None:
    def make(size: int = 8, seed: int = 0, shuffle: bool = True, fingerprint: str = "this") -> Sampler[int]:
        return Sampler(range(size), seed=seed, shuffle=shuffle, fingerprint=fingerprint)

    with pytest.raises(DataError, match=r"not those of the saved run.*was.*is.*Resume with the same"):
        make(**changed).load_state_dict(make().state_dict())  # type: ignore[arg-type]


def test_epochs_may_change_on_resume() -> None:
    first = Sampler(range(4), seed=0, epochs=1)
    first.take(4)
    longer = Sampler(range(4), seed=0, epochs=3)
    longer.load_state_dict(first.state_dict())
    assert longer.remaining() == 8


def test_impossible_amounts_are_refused() -> None:
    with pytest.raises(DataError, match="no rows"):
        Sampler([], seed=0)
    with pytest.raises(DataError, match="epochs = 0"):
        Sampler(range(3), seed=0, epochs=0)
    with pytest.raises(DataError, match="3 usable rows × 1 epochs give no batch of 4"):
        Sampler(range(3), seed=0, epochs=1).total_steps(4)
    with pytest.raises(DataError, match="neither a number of steps nor of epochs"):
        Sampler(range(3), seed=0).total_steps(4)
    with pytest.raises(ValueError, match="at least one"):
        Sampler(range(3), seed=0).take(0)


@given(numbers=st.lists(st.integers(0, 40), min_size=1, max_size=30), seed=st.integers(0, 9), shuffle=st.booleans())
def test_a_draw_by_number_is_that_of_the_stream_whoever_asked_before(
    numbers: list[int], seed: int, shuffle: bool
) -> None:
    stream = Sampler(range(7), seed=seed, shuffle=shuffle).take(41)
    draws = Sampler(range(7), seed=seed, shuffle=shuffle)
    assert [draws.draw(number) for number in numbers] == [stream[number] for number in numbers]
    assert draws.drawn == max(numbers) + 1
