"""The statistics of groups by hand: three groups of which one sample each says nothing."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithms.groups import Groups, countable
from tandem.base.errors import ContractError

IDS = torch.tensor([9, 4, 9, 4, 9, 6, 5])
COUNTED = torch.tensor([True, True, True, False, False, True, False])
VALUES = torch.tensor([1.0, 7.0, 4.0, 100.0, math.nan, 2.0, math.inf]).float()
GROUPS = Groups.of(IDS, COUNTED)
"""By id: 4 (one that counts, 7), 5 (none), 6 (2), 9 (1 and 4)."""


def test_size_and_peers() -> None:
    assert GROUPS.slot.tolist() == [3, 0, 3, 0, 3, 2, 1]
    assert GROUPS.size.tolist() == [1.0, 0.0, 1.0, 2.0]
    assert GROUPS.comparable.tolist() == [True, False, True, False, False, False, False]


def test_total_mean_and_spread_leave_out_what_does_not_count() -> None:
    assert GROUPS.total(VALUES).tolist() == [7.0, 0.0, 2.0, 5.0]
    assert GROUPS.mean(VALUES).tolist() == [7.0, 0.0, 2.0, 2.5]
    assert GROUPS.deviation(VALUES).tolist() == [-1.5, 0.0, 1.5, 0.0, 0.0, 0.0, 0.0]
    assert GROUPS.std(VALUES).tolist() == pytest.approx([0.0, 0.0, 0.0, math.sqrt(4.5)], rel=1e-15)


def test_statistics_are_in_float64_whatever_they_are_of() -> None:
    large = torch.tensor([1e8 + 8, 0, 1e8, 0, 0, 0, 0], dtype=torch.float32)
    for found in (GROUPS.size, GROUPS.total(large), GROUPS.mean(large), GROUPS.deviation(large), GROUPS.std(large)):
        assert found.dtype is torch.float64
    assert GROUPS.mean(large)[3].item() == 1e8 + 4
    assert GROUPS.deviation(large)[0].item() == 4.0


def test_values_of_several_columns_are_summed_by_column() -> None:
    values = torch.stack([VALUES, 2 * VALUES], dim=-1)
    assert GROUPS.total(values).tolist() == [[7.0, 14.0], [0.0, 0.0], [2.0, 4.0], [5.0, 10.0]]


def test_the_lowest_of_a_group_at_each_place() -> None:
    values = torch.tensor([[3.0, -1.0], [5.0, 5.0], [2.0, 0.0], [1.0, 9.0], [-9.0, 8.0], [6.0, 6.0], [0.0, 0.0]])
    present = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 0], [0, 1], [0, 0], [0, 0]]).bool()
    lowest = GROUPS.lowest(values, present)
    assert lowest.dtype is torch.float64
    assert lowest.tolist() == [[1.0, math.inf], [math.inf, math.inf], [math.inf, math.inf], [2.0, -1.0]]


def test_who_counts() -> None:
    rewards = torch.tensor([[0.0, 1.0], [math.nan, 1.0], [1.0, math.inf], [1.0, 1.0], [1.0, math.nan], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [0, 1], [1, 1], [0, 0], [1, 0], [1, 1]]).bool()
    assert countable(rewards, mask).tolist() == [True, True, False, False, True, True]
    valid = torch.tensor([1, 1, 1, 1, 1, 0])
    assert countable(rewards, mask, valid).tolist() == [True, True, False, False, True, False]


def test_an_id_for_each_sample() -> None:
    with pytest.raises(ContractError, match="give one id per sample"):
        Groups.of(IDS[:3], COUNTED)
