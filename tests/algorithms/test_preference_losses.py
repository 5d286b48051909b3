"""Preference losses: values by hand and by plain loops, gradients, and what must not change them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.algorithms import PREFERENCE_LOSSES
from tandem.algorithms.metric import Metric
from tandem.algorithms.preference_losses import Pairs, PreferenceLoss, dpo, kto, orpo, reference_point_of
from tandem.base.errors import ContractError
from tandem.base.registry import Scope

NAMES = PREFERENCE_LOSSES.names()
PAIRED = [name for name in NAMES if "group_ids" in PREFERENCE_LOSSES[name].signature.columns]


@dataclass(frozen=True)
class Answers:
    """B answers, padded to T."""

    logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    response_mask: torch.Tensor
    preferred: torch.Tensor
    group_ids: torch.Tensor
    reference_point: torch.Tensor

    def rows(self, order: torch.Tensor) -> Answers:
        return replace(self, **{f.name: getattr(self, f.name)[order] for f in fields(self)})


@st.composite
def answers(draw: st.DrawFn) -> Answers:
    """1 to 5 pairs in any order, float64, with holes in the mask."""
    pairs, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    dice = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(2 * pairs, width, generator=dice) < 0.7
    mask[:, 0] = True
    old = -torch.randn(2 * pairs, width, dtype=torch.float64, generator=dice).abs() - 0.05
    ids = torch.randperm(1000, generator=dice)[:pairs].repeat_interleave(2)
    made = Answers(
        logprobs=(old + 0.4 * torch.randn(2 * pairs, width, dtype=torch.float64, generator=dice)).clamp(max=-0.01),
        ref_logprobs=old,
        response_mask=mask,
        preferred=torch.arange(2 * pairs) % 2 == 0,
        group_ids=ids,
        reference_point=torch.full((2 * pairs,), draw(st.floats(0, 2)), dtype=torch.float64),
    )
    return made.rows(torch.randperm(2 * pairs, generator=dice))


def call(name: str, batch: Answers, logprobs: torch.Tensor | None = None, **parameters: float) -> PreferenceLoss:
    entry = PREFERENCE_LOSSES[name]
    given = {f.name: getattr(batch, f.name) for f in fields(batch)}
    if logprobs is not None:
        given["logprobs"] = logprobs
    return entry.target(**{c: given[c] for c in entry.signature.columns}, **parameters)


def sum_and_gradient(name: str, batch: Answers, parts: list[torch.Tensor]) -> tuple[float, torch.Tensor]:
    """As a trainer does it: sums of micro-batches accumulate."""
    logprobs = batch.logprobs.clone().requires_grad_()
    total = 0.0
    for rows in parts:
        loss = call(name, batch.rows(rows), logprobs[rows]).terms.sum()
        loss.backward(retain_graph=True)
        total += float(loss.detach())
    assert logprobs.grad is not None
    return total, logprobs.grad


def one_pair(chosen: list[float], rejected: list[float], ref: list[list[float]] | None = None) -> Answers:
    width = max(len(chosen), len(rejected))
    rows = [row + [0.0] * (width - len(row)) for row in (chosen, rejected)]
    return Answers(
        logprobs=torch.tensor(rows, dtype=torch.float64),
        ref_logprobs=torch.tensor(ref if ref is not None else rows, dtype=torch.float64),
        response_mask=torch.tensor([[i < len(row) for i in range(width)] for row in (chosen, rejected)]),
        preferred=torch.tensor([True, False]),
        group_ids=torch.tensor([4, 4]),
        reference_point=torch.full((2,), 0.25, dtype=torch.float64),
    )


# -- by hand: the chosen answer has a log-ratio of 1 to the reference, the rejected one of -2 --

BY_HAND = one_pair([-1.0, -2.0], [-3.0], [[-2.0, -2.0], [-1.0, 0.0]])


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("dpo", {"beta": 0.5}, [-math.log(logistic(0.5 * 3))]),
        (
            "dpo",
            {"beta": 0.5, "label_smoothing": 0.1},
            [-0.9 * math.log(logistic(1.5)) - 0.1 * math.log(logistic(-1.5))],
        ),
        ("ipo", {"beta": 0.25}, [(3 - 2) ** 2]),
        (
            "orpo",
            {"beta": 0.5},
            [1.5 - 0.5 * math.log(logistic(-1.5 - math.log(1 - math.exp(-1.5)) + 3 + math.log(1 - math.exp(-3))))],
        ),
        ("simpo", {"beta": 2.0, "gamma": 0.5}, [-math.log(logistic(2 * -1.5 - 2 * -3 - 0.5))]),
        (
            "kto",
            {"beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 3.0},
            [2 * (1 - logistic(0.5 * (1 - 0.25))), 3 * (1 - logistic(0.5 * (0.25 + 2)))],
        ),
    ],
)
def test_by_hand(name: str, parameters: dict[str, float], expected: list[float]) -> None:
    assert call(name, BY_HAND, **parameters).terms.tolist() == pytest.approx(expected)


def test_a_start_at_the_reference_gives_log_two_and_the_slope_beta_over_two() -> None:
    batch = one_pair([-1.0, -2.0], [-3.0])
    logprobs = batch.logprobs.clone().requires_grad_()
    loss = call("dpo", batch, logprobs, beta=0.4)
    loss.terms.sum().backward()
    assert loss.terms.item() == pytest.approx(math.log(2))
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[pytest.approx(-0.2)] * 2, [pytest.approx(0.2), 0.0]]


def test_the_metrics_of_a_pair() -> None:
    means = {key: metric.mean for key, metric in call("dpo", BY_HAND, beta=0.5).metrics.items()}
    assert means == pytest.approx(
        {
            "preference/accuracy": 1.0,
            "preference/margin": 1.5,
            "preference/chosen_reward": 0.5,
            "preference/rejected_reward": -1.0,
            "preference/chosen_logprob": -3.0,
            "preference/rejected_logprob": -3.0,
        }
    )


def test_the_reference_point_is_the_mean_log_ratio_and_never_negative() -> None:
    logprobs = torch.tensor([[-1.0, 9.0], [-2.0, -1.0]])
    ref = torch.tensor([[-2.0, 7.0], [-4.0, -1.5]])
    mask = torch.tensor([[True, False], [True, True]])
    assert reference_point_of(logprobs, ref, mask).item() == pytest.approx((1.0 + 2.5) / 2)
    assert reference_point_of(ref, logprobs, mask).item() == 0.0


def test_kto_pushes_a_good_answer_up_and_a_bad_one_down_by_its_weight() -> None:
    logprobs = BY_HAND.logprobs.clone().requires_grad_()
    call("kto", BY_HAND, logprobs, undesirable_weight=0.0).terms.sum().backward()
    assert logprobs.grad is not None
    assert (logprobs.grad[0] < 0).all() and (logprobs.grad[1] == 0).all()


@pytest.mark.parametrize("value", [-1e-9, 0.0])
def test_an_answer_of_certainty_keeps_orpo_finite(value: float) -> None:
    batch = one_pair([value], [-1.0])
    logprobs = batch.logprobs.clone().requires_grad_()
    loss = call("orpo", batch, logprobs).terms
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad is not None and logprobs.grad.isfinite().all()


# -- of every loss --


@pytest.mark.parametrize("name", NAMES)
@given(batch=answers())
def test_the_gradient_is_that_of_finite_differences(name: str, batch: Answers) -> None:
    assert torch.autograd.gradcheck(
        lambda logprobs: call(name, batch, logprobs).terms, (batch.logprobs.clone().requires_grad_(),)
    )


@pytest.mark.parametrize("name", NAMES)
@given(batch=answers(), parts=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_splits_between_groups_and_order_change_nothing(name: str, batch: Answers, parts: int, seed: int) -> None:
    everything = torch.arange(len(batch.preferred))
    whole, gradient = sum_and_gradient(name, batch, [everything])
    ids = batch.group_ids.unique()
    shares = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))].tensor_split(parts)
    pieces = [torch.isin(batch.group_ids, share).nonzero()[:, 0].flip(0) for share in shares if len(share)]
    total, other = sum_and_gradient(name, batch, pieces)
    assert total == pytest.approx(whole)
    torch.testing.assert_close(other, gradient)
    summed: dict[str, Metric] = {}
    for rows in pieces:
        for key, metric in call(name, batch.rows(rows)).metrics.items():
            summed[key] = summed[key] + metric if key in summed else metric
    assert {k: m.mean for k, m in summed.items()} == pytest.approx(
        {k: m.mean for k, m in call(name, batch).metrics.items()}
    )


@pytest.mark.parametrize("name", NAMES)
@given(batch=answers(), fill=st.sampled_from([math.nan, math.inf, 7.0]))
def test_what_is_masked_is_never_seen(name: str, batch: Answers, fill: float) -> None:
    def poisoned(column: torch.Tensor) -> torch.Tensor:
        wide = torch.nn.functional.pad(torch.where(batch.response_mask, column, fill), (0, 2), value=fill)
        return wide.clone()

    wide = replace(
        batch,
        logprobs=poisoned(batch.logprobs),
        ref_logprobs=poisoned(batch.ref_logprobs),
        response_mask=torch.nn.functional.pad(batch.response_mask, (0, 2)),
    )
    rows = [torch.arange(len(batch.preferred))]
    (clean, gradient), (dirty, other) = sum_and_gradient(name, batch, rows), sum_and_gradient(name, wide, rows)
    assert dirty == pytest.approx(clean)
    torch.testing.assert_close(other[:, :-2], gradient)
    assert not other[~wide.response_mask].any()


@pytest.mark.parametrize("name", NAMES)
@given(batch=answers())
def test_a_step_down_the_gradient_lowers_the_loss(name: str, batch: Answers) -> None:
    total, gradient = sum_and_gradient(name, batch, [torch.arange(len(batch.preferred))])
    lower = call(name, batch, batch.logprobs - 1e-4 * gradient).terms.sum().item()
    assert lower < total


@given(batch=answers(), beta=st.floats(0.01, 2.0))
def test_dpo_and_kto_agree_with_plain_loops(batch: Answers, beta: float) -> None:
    ratios = {}
    for row, (now, ref, mask) in enumerate(
        zip(batch.logprobs.tolist(), batch.ref_logprobs.tolist(), batch.response_mask.tolist(), strict=True)
    ):
        ratio = sum(a - b for a, b, m in zip(now, ref, mask, strict=True) if m)
        ratios[int(batch.group_ids[row]), bool(batch.preferred[row])] = ratio
    expected = {g: -math.log(logistic(beta * (ratios[g, True] - ratios[g, False]))) for g, _ in ratios}
    found = dpo(batch.logprobs, batch.ref_logprobs, batch.response_mask, batch.preferred, batch.group_ids, beta=beta)
    assert found.terms.tolist() == pytest.approx([expected[g] for g in sorted(expected)])
    z = float(batch.reference_point[0])
    one_by_one = [
        1 - logistic(beta * (ratios[int(g), bool(good)] - z) * (1 if good else -1))
        for g, good in zip(batch.group_ids, batch.preferred, strict=True)
    ]
    judged = kto(
        batch.logprobs, batch.ref_logprobs, batch.response_mask, batch.preferred, batch.reference_point, beta=beta
    )
    assert judged.terms.tolist() == pytest.approx(one_by_one)


def test_orpo_takes_the_mean_over_an_answer_so_that_length_does_not_count() -> None:
    short, long = one_pair([-1.0], [-2.0]), one_pair([-1.0] * 5, [-2.0] * 3)
    assert call("orpo", short).terms.tolist() == pytest.approx(call("orpo", long).terms.tolist())


@pytest.mark.parametrize("name", PAIRED)
def test_a_loss_on_pairs_looks_at_a_group(name: str) -> None:
    assert PREFERENCE_LOSSES[name].scope is Scope.GROUP


@pytest.mark.parametrize(
    ("preferred", "ids"),
    [([True, True], [1, 1]), ([True, False], [1, 2]), ([True, False, True, False], [1, 1, 1, 1]), ([True], [1])],
)
def test_what_is_no_pair_is_refused(preferred: list[bool], ids: list[int]) -> None:
    with pytest.raises(ContractError, match="no pair"):
        Pairs.of(torch.tensor(preferred), torch.tensor(ids))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("dpo", {"beta": 0.0}),
        ("dpo", {"label_smoothing": 0.5}),
        ("ipo", {"beta": -1.0}),
        ("orpo", {"beta": -0.1}),
        ("simpo", {"beta": 0.0}),
        ("kto", {"beta": 0.0}),
        ("kto", {"desirable_weight": -1.0}),
    ],
)
def test_senseless_parameters_are_refused(name: str, parameters: dict[str, float]) -> None:
    with pytest.raises(ContractError, match=next(iter(parameters))):
        call(name, BY_HAND, **parameters)


def test_a_batch_without_a_trained_token_is_finite() -> None:
    empty = replace(BY_HAND, response_mask=torch.zeros_like(BY_HAND.response_mask))
    assert orpo(empty.logprobs, empty.response_mask, empty.preferred, empty.group_ids).terms.isfinite().all()


# -- what is told --

TOLD = {
    "logprobs": torch.tensor([[-1.0, -2.0], [-3.0, -4.0], [-0.5, 9.0], [-2.0, -1.0]]).double(),
    "ref_logprobs": torch.tensor([[-2.0, -2.0], [-3.0, -3.0], [-1.0, 9.0], [-1.0, -1.0]]).double(),
    "response_mask": torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1]]).bool(),
    "preferred": torch.tensor([True, False, False, True]),
}
"""Two pairs: log-ratios 1 and -1, then -1 (chosen) and 0.5; log-probs -3 and -7, then -3 (chosen) and -0.5."""


@pytest.mark.parametrize(
    ("name", "parameters", "chosen", "rejected", "accuracy"),
    [
        ("dpo", {"beta": 0.5}, 0.0, 0.5 * -0.25, 0.5),
        ("ipo", {"beta": 0.5}, 0.0, 0.5 * -0.25, 0.5),
        ("orpo", {"beta": 0.5}, 0.5 * -1.5, 0.5 * -2.0, 0.5),
        ("simpo", {"beta": 2.0}, 2 * -1.5, 2 * -2.0, 0.5),
    ],
)
def test_what_a_comparison_tells(
    name: str, parameters: dict[str, float], chosen: float, rejected: float, accuracy: float
) -> None:
    entry = PREFERENCE_LOSSES[name]
    given = {**TOLD, "group_ids": torch.tensor([4, 4, 2, 2])}
    told = entry.target(**{column: given[column] for column in entry.signature.columns}, **parameters).metrics
    found = {key.removeprefix("preference/"): metric.mean for key, metric in told.items()}
    assert found["chosen_reward"] == pytest.approx(chosen)
    assert found["rejected_reward"] == pytest.approx(rejected)
    assert found["margin"] == pytest.approx(chosen - rejected)
    assert found["accuracy"] == accuracy
    assert (found["chosen_logprob"], found["rejected_logprob"]) == (-3.0, -3.75)


def test_what_judging_answers_alone_tells() -> None:
    told = kto(**TOLD, reference_point=torch.full((4,), 0.75).double(), beta=0.5, undesirable_weight=2.0)
    found = {key.removeprefix("preference/"): metric.mean for key, metric in told.metrics.items()}
    assert found == pytest.approx(
        {
            "accuracy": 0.75,  # of the good answers one is above 0.75, both bad ones are below
            "chosen_reward": 0.0,
            "rejected_reward": 0.5 * -0.25,
            "chosen_logprob": -3.0,
            "rejected_logprob": -3.75,
            "reference_point": 0.75,
        }
    )
    gains = [0.5 * gain for gain in (0.25, 1.75, 0.25, -1.75)]
    weights = [1.0, 2.0, 2.0, 1.0]
    expected = [w / (1 + math.exp(gain)) for w, gain in zip(weights, gains, strict=True)]
    assert told.terms.tolist() == pytest.approx(expected)
