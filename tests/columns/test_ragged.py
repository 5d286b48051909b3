"""Ragged against plain Python lists of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ContractError
from tandem.columns.equality import same_ragged
from tandem.columns.ragged import Ragged

Rows = list[list[int]]
rows_of_ints = st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=6), max_size=7)


def ragged(rows: Rows) -> Ragged:
    return Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in rows], dtype=torch.int64)


def plain(column: Ragged) -> Rows:
    return [row.tolist() for row in column]


@given(rows_of_ints)
def test_rows_come_back(rows: Rows) -> None:
    column = ragged(rows)
    assert len(column) == len(rows)
    assert plain(column) == rows
    assert [column.row(i).tolist() for i in range(len(rows))] == rows
    assert [column[-i - 1].tolist() for i in range(len(rows))] == rows[::-1]
    assert column.lengths.tolist() == [len(row) for row in rows]


@given(rows_of_ints, st.data())
def test_every_kind_of_index_chooses_like_a_list(rows: Rows, data: st.DataObject) -> None:
    column, size = ragged(rows), len(rows)
    cut = data.draw(st.slices(size)) if size else slice(None)
    assert plain(column[cut]) == rows[cut]
    order = data.draw(st.lists(st.integers(-size, size - 1), max_size=9)) if size else []
    assert plain(column[order]) == [rows[i] for i in order]
    assert plain(column[torch.tensor(order, dtype=torch.int64)]) == [rows[i] for i in order]
    mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    kept = [row for row, keep in zip(rows, mask, strict=True) if keep]
    assert plain(column[torch.tensor(mask, dtype=torch.bool)]) == kept
    assert plain(column[mask]) == kept


def test_long_rows_are_chosen_like_short_ones() -> None:
    lengths = [900, 0, 1200, 700]
    column = Ragged.from_lengths(torch.arange(sum(lengths)), lengths)
    chosen = column[[2, 0, 2, 1]]
    assert same_ragged(chosen, Ragged.from_rows([column.row(i) for i in (2, 0, 2, 1)]))


@given(rows_of_ints, st.booleans(), st.integers(0, 4))
def test_padded_and_back(rows: Rows, left: bool, extra: int) -> None:
    column = ragged(rows)
    width = max(map(len, rows), default=0) + extra
    dense = column.padded(-7, width, left=left)
    pads = [[-7] * (width - len(row)) for row in rows]
    assert dense.tolist() == [pad + row if left else row + pad for row, pad in zip(rows, pads, strict=True)]
    assert same_ragged(Ragged.from_padded(dense, column.mask(width, left=left)), column)
    assert column.padded().shape == (len(rows), max(map(len, rows), default=0))


@given(st.lists(rows_of_ints, min_size=1, max_size=4))
def test_concat_joins_rows(parts: list[Rows]) -> None:
    assert plain(Ragged.concat([ragged(part) for part in parts])) == [row for part in parts for row in part]


def test_trailing_dimensions_survive() -> None:
    column = Ragged.from_rows([torch.rand(2, 3), torch.rand(0, 3), torch.rand(4, 3)])
    dense = column.padded()
    assert dense.shape == (3, 4, 3)
    assert same_ragged(Ragged.from_padded(dense, column.mask()), column)
    assert torch.equal(column[[2, 0]].row(0), column.row(2))


def test_gradients_pass_through_padding_and_choice() -> None:
    values = torch.rand(5, requires_grad=True)
    column = Ragged.from_lengths(values, [2, 0, 3])
    (column[[2, 2]].padded().sum() + column.padded().sum()).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 1, 3, 3, 3]


def test_slices_and_rows_are_views() -> None:
    column = ragged([[1, 2], [3], [4, 5, 6]])
    column.values[2] = 30
    assert column.row(1).tolist() == [30]
    assert column[1:].values.data_ptr() == column.values[2:].data_ptr()


@pytest.mark.parametrize(
    ("offsets", "why"),
    [([0, 2], "rise"), ([1, 3], "rise"), ([0, 3, 2, 3], "rise"), ([], "expected"), ([[0, 3]], "expected")],
)
def test_broken_offsets_are_refused(offsets: Any, why: str) -> None:
    with pytest.raises(ContractError, match=why):
        Ragged(torch.arange(3), torch.tensor(offsets, dtype=torch.int64))


def test_negative_lengths_are_refused() -> None:
    with pytest.raises(ContractError, match="rise"):
        Ragged.from_lengths(torch.arange(3), [4, -1])


def test_a_mask_with_a_hole_is_no_padding() -> None:
    mask = torch.tensor([[True, True, False], [True, False, True]])
    with pytest.raises(ContractError, match="row 1 has a hole"):
        Ragged.from_padded(torch.zeros(2, 3), mask)


def test_too_narrow_padding_is_refused() -> None:
    with pytest.raises(ContractError, match="width 2 is less than the longest row, 3"):
        ragged([[1, 2, 3]]).padded(width=2)


@pytest.mark.parametrize("index", [[2], [-3], torch.tensor([0, 5])])
def test_a_row_that_is_not_there(index: Any) -> None:
    with pytest.raises(IndexError):
        ragged([[1], [2]])[index]


@pytest.mark.parametrize("index", [torch.tensor([True]), torch.tensor([0.5, 1.0]), torch.zeros(2, 2).long()])
def test_an_index_of_a_wrong_kind(index: Any) -> None:
    with pytest.raises(ContractError):
        ragged([[1], [2]])[index]


def test_rows_of_different_dtypes_are_refused() -> None:
    with pytest.raises(ContractError, match="row 1"):
        Ragged.from_rows([torch.tensor([1]), torch.tensor([1.0])])
    with pytest.raises(ContractError, match="parts differ"):
        Ragged.concat([ragged([[1]]), ragged([[1]]).to(dtype=torch.int32)])
