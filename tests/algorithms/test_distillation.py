"""Distillation objectives: values by hand and by the full formula, gradients, and what must not change a result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms import DISTILLATIONS
from tandem.algorithms.distillation import DistillationTerms, forward_kl_topk, jsd_topk, reverse_kl
from tandem.algorithms.reduce import Aggregation, LossCounts, count, denominator, loss_numerator
from tandem.base.errors import ContractError
from tandem.base.registry import Scope

VOCAB = 7
TERMS = [name for name in DISTILLATIONS.names() if "student_topk_logprobs" in DISTILLATIONS[name].signature.columns]
SETTINGS = [{}, {"discount": 0.5}, {"discount": 1.0}]


class Case:
    """B samples of T places: logits of student and teacher over the vocabulary, sampled tokens, a mask with holes."""

    def __init__(self, seed: int, samples: int = 5, width: int = 4) -> None:
        random = torch.Generator().manual_seed(seed)
        shape = samples, width, VOCAB
        self.student = torch.randn(shape, dtype=torch.float64, generator=random)
        self.teacher = 2 * torch.randn(shape, dtype=torch.float64, generator=random)
        self.tokens = torch.randint(VOCAB, (samples, width, 1), generator=random)
        self.mask = torch.rand(samples, width, generator=random) < 0.7
        self.mask[0, 0] = True

    def columns(self, student: torch.Tensor, top_k: int) -> dict[str, torch.Tensor]:
        """What an objective reads, with the gradient going to the ``student``'s logits."""
        mine, given = student.log_softmax(-1), self.teacher.log_softmax(-1)
        best = given.topk(top_k)
        return {
            "old_logprobs": mine.gather(-1, self.tokens)[..., 0],
            "teacher_logprobs": given.gather(-1, self.tokens)[..., 0],
            "student_topk_logprobs": mine.gather(-1, best.indices),
            "teacher_topk_logprobs": best.values,
            "response_mask": self.mask,
        }


def run(name: str, columns: dict[str, torch.Tensor], **parameters: Any) -> DistillationTerms:
    entry = DISTILLATIONS[name]
    return entry.target(**{column: columns[column] for column in entry.signature.columns}, **parameters)


def result(terms: DistillationTerms) -> torch.Tensor:
    """The one of the two that an objective gives."""
    (found,) = (part for part in (terms.advantages, terms.per_token) if part is not None)
    return found


# -- values --


def test_reverse_kl_by_hand() -> None:
    student, teacher = torch.tensor([[-1.0, -0.5, -9.0, -2.0]]), torch.tensor([[-1.5, -0.2, math.nan, -1.0]])
    mask = torch.tensor([[True, True, False, True]])
    now = reverse_kl(student, teacher, mask)
    assert result(now).flatten().tolist() == pytest.approx([-0.5, 0.3, 0.0, 1.0])
    assert now.metrics["distill/kl"].mean == pytest.approx(-0.8 / 3)
    assert result(reverse_kl(student, teacher, mask, discount=0.5)).flatten().tolist() == pytest.approx(
        [-0.5 + 0.5 * (0.3 + 0.5 * 1.0), 0.3 + 0.5 * 1.0, 0.0, 1.0]
    )
    assert result(reverse_kl(student, teacher, mask, discount=1.0)).flatten().tolist() == pytest.approx(
        [0.8, 1.3, 0.0, 1.0]
    )


def test_reverse_kl_moves_a_categorical_policy_as_the_gradient_of_its_kl_does() -> None:
    case = Case(3, samples=1, width=1)
    logits = case.student[0, 0].clone().requires_grad_()
    mine, given = logits.log_softmax(-1), case.teacher[0, 0].log_softmax(-1)
    exact = torch.autograd.grad((mine.exp() * (mine - given)).sum(), logits)[0]
    every = torch.ones(1, VOCAB, dtype=torch.bool)
    mine = logits.log_softmax(-1)
    advantages = result(reverse_kl(mine[None], given[None], every))[0]
    expected = (mine.detach().exp() * -advantages * mine).sum()  # the policy gradient, every token by its probability
    torch.testing.assert_close(torch.autograd.grad(expected, logits)[0], exact)


def test_forward_kl_by_hand() -> None:
    teacher, student = torch.tensor([[[0.5, 0.3]]]).log(), torch.tensor([[[0.25, 0.25]]]).log()
    found = forward_kl_topk(student, teacher, torch.ones(1, 1, dtype=torch.bool), top_k=2)
    expected = 0.5 * math.log(2) + 0.3 * math.log(1.2) + 0.2 * math.log(0.2 / 0.5)
    assert result(found).item() == pytest.approx(expected, rel=1e-5)
    assert found.metrics["distill/kl"].mean == pytest.approx(expected, rel=1e-5)
    assert found.metrics["distill/tail"].mean == pytest.approx(0.2, rel=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), beta=st.sampled_from([0.1, 0.5, 0.9]))
def test_with_the_whole_vocabulary_they_are_the_plain_formulas(seed: int, beta: float) -> None:
    case = Case(seed)
    student = case.student.requires_grad_()
    p, q = case.teacher.log_softmax(-1), case.student.log_softmax(-1)
    m = (beta * p.exp() + (1 - beta) * q.exp()).log()
    kl = (p.exp() * (p - q)).sum(-1)
    jsd = beta * (p.exp() * (p - m)).sum(-1) + (1 - beta) * (q.exp() * (q - m)).sum(-1)
    columns = case.columns(student, VOCAB)
    for found, plain in (
        (run("forward_kl_topk", columns, top_k=VOCAB), kl),
        (run("jsd_topk", columns, top_k=VOCAB, beta=beta), jsd),
    ):
        expected = torch.where(case.mask, plain, 0.0)
        torch.testing.assert_close(result(found), expected, atol=1e-5, rtol=1e-5)
        pair = (torch.autograd.grad(x.sum(), student, retain_graph=True)[0] for x in (result(found), expected))
        torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_more_tokens_see_more_of_the_divergence_and_never_too_much(seed: int) -> None:
    case = Case(seed)
    by_k = [result(run("forward_kl_topk", case.columns(case.student, k), top_k=k)) for k in (1, 2, 4, VOCAB)]
    for fewer, more in itertools.pairwise(by_k):
        assert bool((fewer <= more + 1e-5).all()) and bool((fewer >= -1e-5).all())
    same = Case(seed)
    same.teacher = same.student
    for name in TERMS:
        found = result(run(name, same.columns(same.student, 3), top_k=3))
        torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-9, rtol=0)


# -- gradients --


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("top_k", [1, 3, VOCAB])
def test_gradients_are_those_of_the_values(name: str, top_k: int) -> None:
    case = Case(1, samples=2, width=3)

    def loss(student: torch.Tensor) -> torch.Tensor:
        return result(run(name, case.columns(student, top_k), top_k=top_k))

    assert torch.autograd.gradcheck(loss, (case.student.requires_grad_(),), atol=1e-6)


@pytest.mark.parametrize("parameters", SETTINGS)
def test_advantages_carry_no_gradient(parameters: dict[str, float]) -> None:
    case = Case(2)
    assert not result(run("reverse_kl", case.columns(case.student.requires_grad_(), 3), **parameters)).requires_grad


# -- what must not change a result --

EVERY = [("reverse_kl", p) for p in SETTINGS] + [(name, {"top_k": 3}) for name in TERMS]


@pytest.mark.parametrize(("name", "parameters"), EVERY)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), fill=st.sampled_from([math.nan, math.inf, -1e30]), extra=st.integers(0, 2))
def test_what_is_masked_has_no_effect(
    name: str, parameters: dict[str, float], seed: int, fill: float, extra: int
) -> None:
    case = Case(seed)
    student = case.student.requires_grad_()
    clean = result(run(name, case.columns(student, 3), **parameters))

    def spoilt(column: torch.Tensor) -> torch.Tensor:
        if column.dtype == torch.bool:
            return torch.nn.functional.pad(column, (0, extra))
        mask = case.mask if column.dim() == 2 else case.mask[..., None]
        padding = (0, extra) if column.dim() == 2 else (0, 0, 0, extra)
        return torch.nn.functional.pad(torch.where(mask, column, fill), padding, value=fill)

    dirty = {column: spoilt(values) for column, values in case.columns(student, 3).items()}
    found = run(name, dirty, **parameters)
    width = case.mask.shape[1]
    torch.testing.assert_close(result(found)[:, :width], clean, rtol=0, atol=0)
    assert bool((result(found)[:, width:] == 0).all())
    assert all(math.isfinite(metric.mean) for metric in found.metrics.values())
    if found.per_token is not None:
        gradient = torch.autograd.grad(found.per_token.sum(), student)[0]
        assert bool(gradient.isfinite().all()) and bool((gradient[~case.mask] == 0).all())


@pytest.mark.parametrize(("name", "parameters"), EVERY)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), parts=st.sampled_from([1, 2, 4]), mode=st.sampled_from(list(Aggregation)))
def test_order_and_cuts_change_neither_loss_nor_metrics(
    name: str, parameters: dict[str, float], seed: int, parts: int, mode: Aggregation
) -> None:
    case = Case(seed)
    columns = case.columns(case.student, 3)

    def summed(slices: list[torch.Tensor]) -> list[float]:
        total, counts, metrics = 0.0, LossCounts(), dict[str, Any]()
        for rows in slices:
            part = {column: values[rows] for column, values in columns.items()}
            found = run(name, part, **parameters)
            total += float(loss_numerator(result(found), part["response_mask"], mode))
            counts += count(part["response_mask"])
            metrics = {k: metrics[k] + m if k in metrics else m for k, m in found.metrics.items()}
        return [total / denominator(mode, counts, norm=7.0), *(metrics[k].mean for k in sorted(metrics))]

    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    assert summed(list(order.tensor_split(parts))) == pytest.approx(summed([torch.arange(5)]), rel=1e-9, abs=1e-12)


# -- errors and declarations --


def test_what_cant_be_computed_is_refused() -> None:
    one, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ContractError, match="discount"):
        reverse_kl(one, one, mask, discount=1.5)
    with pytest.raises(ContractError, match="beta"):
        jsd_topk(one[..., None], one[..., None], mask, top_k=1, beta=1.0)
    with pytest.raises(ContractError, match=r"top_k = 64.*hold 1"):
        forward_kl_topk(one[..., None], one[..., None], mask)


def test_all_may_be_pipelined() -> None:
    assert {DISTILLATIONS[name].scope for name in TERMS} == {Scope.TOKEN}
    assert all(DISTILLATIONS[name].scope < Scope.GROUP for name in DISTILLATIONS)


@pytest.mark.parametrize("objective", [forward_kl_topk, jsd_topk])
def test_the_mass_outside_the_top_k_that_is_told_is_the_teachers(objective: Callable[..., DistillationTerms]) -> None:
    teacher, student = torch.tensor([[[0.6, 0.3]]]).log(), torch.tensor([[[0.3, 0.1]]]).log()
    terms = objective(student, teacher, torch.tensor([[True]]), top_k=2)
    assert terms.metrics["distill/tail"].mean == pytest.approx(0.1, rel=1e-5)
