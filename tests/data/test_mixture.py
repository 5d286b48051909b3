"""A mix of data sets: shares to within one item, the order of each its own, and a place that can be resumed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tandem.base.errors import DataError
from tandem.data.catalog import OnBadRow
from tandem.data.examples import ConversationSource, Example, ExampleColumns
from tandem.data.mixture import Mixture, Part
from tandem.data.rows import RowsTable
from tandem.models.tokenizer import character_tokenizer

TOKENIZER: PreTrainedTokenizerFast = character_tokenizer("abc0123456789")


def part(
    name: str, weight: float, rows: int, *, seed: int = 0, bad: int = 0, epochs: int | None = None
) -> Part[Example]:
    table = [{"prompt": name, "response": str(i)} for i in range(rows)] + [{"prompt": name}] * bad
    draws = ConversationSource(
        [RowsTable(name, table)],
        tokenizer=TOKENIZER,
        columns=ExampleColumns(),
        max_length=9,
        on_bad_row=OnBadRow.DROP,
        seed=seed,
        epochs=epochs,
    )
    return Part(name, weight, draws)


def names(taken: list[Example]) -> str:
    return "".join(TOKENIZER.decode(example.input_ids[:1]) for example in taken)


@settings(max_examples=30)
@given(
    weights=st.lists(st.floats(0.05, 10), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    takes=st.lists(st.integers(1, 7), min_size=1, max_size=12),
)
def test_each_part_has_its_share_after_any_number_of_draws(
    weights: list[float], sizes: list[int], takes: list[int]
) -> None:
    mix = Mixture([part(n, w, size) for n, w, size in zip("abc", weights, sizes, strict=False)])
    told = ""
    for count in takes:
        told += names(mix.take(count))
        for name, weight in zip("abc", weights, strict=False):
            assert abs(told.count(name) - len(told) * weight / sum(weights)) <= len(weights) - 1 + 1e-9
            assert mix.drawn[name] == told.count(name)


@settings(max_examples=20)
@given(before=st.integers(0, 40), seed=st.integers(0, 5))
def test_a_place_is_resumed_whatever_was_drawn_before(before: int, seed: int) -> None:
    def make() -> Mixture[Example]:
        return Mixture([part("a", 0.7, 4, seed=seed), part("b", 0.3, 3, seed=seed + 1)], epochs=9)

    whole, first, second = make(), make(), make()
    expected = whole.take(60)
    taken = first.take(before) if before else []
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [*taken, *second.take(60 - before)] == expected


def test_rows_within_a_part_come_once_an_epoch_of_their_own() -> None:
    mix = Mixture([part("a", 1, 3), part("b", 3, 9)])
    drawn = [TOKENIZER.decode(example.input_ids[:2]) for example in mix.take(24)]
    assert sorted(drawn) == sorted([f"a{i}" for i in range(3)] * 2 + [f"b{i}" for i in range(9)] * 2)
    assert names(mix.take(8)).count("a") == 2


def test_an_epoch_is_as_many_draws_as_there_are_rows() -> None:
    mix = Mixture([part("a", 1, 4), part("b", 1, 2)], epochs=2)
    assert len(mix) == 6
    assert mix.total_steps(5) == 2 and mix.total_steps(5, 1) == 1
    assert len(mix.take(99)) == 12 and mix.take(1) == []
    with pytest.raises(DataError, match="6 usable rows × 2 epochs give no batch of 13"):
        mix.total_steps(13)


def test_rows_are_counted_over_all_parts() -> None:
    counts = Mixture([part("a", 1, 4, bad=2), part("b", 1, 2, bad=1)]).counts
    assert (counts.rows, counts.kept, counts.dropped) == (9, 6, {"missing column": 3})


def test_another_mix_is_refused() -> None:
    state = Mixture([part("a", 1, 4), part("b", 1, 2)]).state_dict()
    with pytest.raises(DataError, match=r"the mix was \{'a': 1, 'b': 1\}, is \{'a': 2, 'b': 1\}"):
        Mixture([part("a", 2, 4), part("b", 1, 2)]).load_state_dict(state)
    with pytest.raises(DataError, match="not those of the saved run"):
        Mixture([part("a", 1, 4), part("b", 1, 3)]).load_state_dict(state)
    with pytest.raises(DataError, match="not those of the saved run"):
        Mixture([part("a", 1, 4), part("b", 1, 2)]).load_state_dict(part("a", 1, 4).draws.state_dict())
    with pytest.raises(DataError, match=r"not those of the saved run \(a mix\)"):
        part("a", 1, 4).draws.load_state_dict(state)


def test_parts_are_endless_and_of_different_names() -> None:
    with pytest.raises(DataError, match="different names, not a, a"):
        Mixture([part("a", 1, 4), part("a", 1, 2)])
    with pytest.raises(DataError, match="a: a part of a mix is drawn without end"):
        Mixture([part("a", 1, 4, epochs=1)])
