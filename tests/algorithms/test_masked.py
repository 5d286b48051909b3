"""Statistics of selected entries, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten, select
from tandem.algorithms.metric import Metric
from tandem.base.errors import ContractError

VALUES = torch.tensor([[1.0, math.nan, 4.0], [math.inf, 7.0, math.nan], [math.nan, math.nan, math.nan]]).double()
MASK = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0]]).bool()


def test_what_is_not_selected_is_replaced() -> None:
    assert select(VALUES, MASK).tolist() == [[1.0, 0.0, 4.0], [0.0, 7.0, 0.0], [0.0, 0.0, 0.0]]
    assert select(VALUES, MASK, fill=-2.0)[0].tolist() == [1.0, -2.0, 4.0]


def test_a_mask_is_bool_and_of_the_shape_of_the_values() -> None:
    with pytest.raises(ContractError, match="int64"):
        select(VALUES, MASK.long())
    for shape in ((1, 3), (3, 1), (3,)):
        with pytest.raises(ContractError, match="make them equal"):
            select(VALUES, torch.ones(shape, dtype=torch.bool))


def test_sums_and_means_of_all_and_along_an_axis() -> None:
    assert masked_sum(VALUES, MASK).item() == 12.0
    assert masked_mean(VALUES, MASK).item() == 4.0
    assert masked_sum(VALUES, MASK, dim=-1).tolist() == [5.0, 7.0, 0.0]
    assert masked_mean(VALUES, MASK, dim=-1).tolist() == [2.5, 7.0, 0.0]
    assert masked_mean(VALUES, MASK, dim=0).tolist() == [1.0, 7.0, 4.0]


def test_the_variance_is_unbiased_and_needs_two_values() -> None:
    assert masked_var(VALUES, MASK).item() == 9.0  # deviations -3, 0 and 3 of 1, 4 and 7
    two, one = MASK.clone(), MASK.clone()
    two[1], one[0] = False, False
    assert masked_var(VALUES, two).item() == 4.5
    for chosen, count in ((one, 1), (torch.zeros_like(MASK), 0)):
        with pytest.raises(ContractError, match=f"the variance of {count} selected"):
            masked_var(VALUES, chosen)


def test_whitening_shifts_and_scales_or_only_scales() -> None:
    assert masked_whiten(VALUES, MASK)[0].tolist() == pytest.approx([-1.0, 0.0, 0.0])
    assert masked_whiten(VALUES, MASK)[1].tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert masked_whiten(VALUES, MASK, keep_mean=True)[0].tolist() == pytest.approx([3.0, 0.0, 4.0])
    assert masked_whiten(VALUES, MASK, epsilon=27.0)[0].tolist() == pytest.approx([-0.5, 0.0, 0.0])
    assert masked_whiten(torch.full((1, 2), 3.0), torch.ones(1, 2, dtype=torch.bool)).tolist() == [[0.0, 0.0]]


def test_whitening_computes_in_float64_and_gives_the_dtype_of_the_values() -> None:
    values = (2.0**23 + torch.tensor([[0.0, 1.0, 1.0, 1.0, 3.0]])).float()
    white = masked_whiten(values, torch.ones_like(values, dtype=torch.bool))
    assert white.dtype is torch.float32
    spread = math.sqrt(1.2)  # of 0, 1, 1, 1, 3 about 1.2: (1.44 + 3 * 0.04 + 3.24) / 4
    expected = [-1.2 / spread, -0.2 / spread, -0.2 / spread, -0.2 / spread, 1.8 / spread]
    assert white[0].tolist() == pytest.approx(expected, rel=1e-6)


def test_a_metric_is_a_sum_and_a_count_until_it_is_asked_for() -> None:
    values = VALUES.clone().requires_grad_()
    metric = Metric.over(values, MASK)
    assert (metric.sum.item(), metric.count.item(), metric.mean) == (12.0, 3, 4.0)
    assert not metric.sum.requires_grad
    both = metric + Metric(torch.tensor(8.0), torch.tensor(1))
    assert (both.sum.item(), both.count.item(), both.mean) == (20.0, 4, 5.0)
    assert Metric.over(values, torch.zeros_like(MASK)).mean == 0.0
    assert Metric(torch.tensor(0.5), torch.tensor(1)).mean == 0.5
