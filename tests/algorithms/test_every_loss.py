"""What holds for every registered policy loss: one case by hand, its gradient, and what may not change it.

A loss that is added is covered by itself, except that ``BY_HAND`` asks for its case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms import KL_TYPES, POLICY_LOSSES
from tandem.algorithms.masked import select
from tandem.algorithms.reduce import Aggregation, count, denominator, loss_numerator
from tandem.base.registry import Scope
from tandem.train.objective import PolicyObjective
from tandem.train.shard_batch import shard_rows
from tests.algorithms.batches import Batch, batches, splits
from tests.algorithms.entries import LOSSES, PARAMETERS, SPLITTABLE, loss_and_gradient, own, run_loss

MODES = list(Aggregation)

# -- by hand --

PI, OLD, BEHAVIOUR = [0.5, 0.2, 0.55], [0.4, 0.4, 0.5], [0.25, 0.1, 0.5]
A = [1.0, -2.0, -1.0]
L = [math.log(p) for p in PI]
R = [1.25, 0.5, 1.1]
"""Ratios pi / old of the three tokens; a fourth one is masked and NaN. The answer's own: the geometric mean."""
S = math.prod(R) ** (1 / 3)
G = math.exp((0.2 - 0.2 + math.log(1.1)) / 3)
"""As ``S`` with the log-ratios clipped to +-0.2 on the side to which the advantage pushes."""


def _gate(ratio: float, tau: float) -> float:
    return 1 / (1 + math.exp(-tau * (ratio - 1)))


SAPO = [_gate(R[0], 1.0), _gate(R[1], 1.05), _gate(R[2], 1.05)]
Case = tuple[dict[str, Any], list[float], list[float]]
BY_HAND: dict[str, Case] = {
    # parameters, terms, gradient of their sum by the log-probs
    "ppo_clip": ({}, [-1.2, 1.6, 1.1], [0.0, 0.0, 1.1]),
    "gpg": ({}, [-L[0], 2 * L[1], L[2]], [-1.0, 2.0, 1.0]),
    "cispo": ({}, [-1.2 * L[0], 1.6 * L[1], 1.1 * L[2]], [-1.2, 1.6, 1.1]),
    "dppo_tv": ({"clip_ratio": 0.15}, [-1.25 * L[0], 0.0, 1.1 * L[2]], [-1.25, 0.0, 1.1]),
    "dppo_kl": ({"clip_ratio": 0.05}, [-1.25 * L[0], 0.0, 1.1 * L[2]], [-1.25, 0.0, 1.1]),
    "sapo": (
        {},
        [-4 * SAPO[0], 8 / 1.05 * SAPO[1], 4 / 1.05 * SAPO[2]],
        [-a * 4 * s * (1 - s) * r for a, s, r in zip(A, SAPO, R, strict=True)],
    ),
    "dro": (
        {"dro_beta": 0.5},
        [-a * log + 0.25 * math.log(r) ** 2 for a, log, r in zip(A, L, R, strict=True)],
        [-a + 0.5 * math.log(r) for a, r in zip(A, R, strict=True)],
    ),
    "gspo": ({}, [-S, 2 * S, S], [-S, 2 * S, S]),
    "geo_mean": ({}, [2 / 3 * G] * 3, [0.0, 0.0, 2 / 3 * G]),
    "clip_cov": (
        {"clip_ratio": 0.6, "clip_cov_ratio": 1.0, "clip_cov_lb": 0.3, "clip_cov_ub": 2.0},
        [0.0, 0.0, 1.1],  # covariances 0.46, 0.86 and -0.12
        [0.0, 0.0, 1.1],
    ),
    "kl_cov": (
        {"kl_cov_ratio": 0.4, "ppo_kl_coef": 0.5},
        [-1.25, 1.0 + 0.5 * math.log(2), 1.1],
        [-1.25, 1.0 - 0.5, 1.1],
    ),
    "decoupled_ppo": ({"clip_ratio_high": 0.5, "behaviour_cap": 3.0}, [-1.25 * 1.6, 0.0, 1.1], [-2.0, 0.0, 1.1]),
    "m2po": ({}, [0.0, 4.0, 1.1], [0.0, 4.0, 1.1]),  # of the ratios 2, 2, 1.1 to the behaviour only the first leaves
}


def logs(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([[*(math.log(p) for p in probabilities), math.nan]], dtype=torch.float64)


@pytest.mark.parametrize("name", LOSSES)
def test_terms_and_gradient_by_hand(name: str) -> None:
    parameters, terms, slopes = BY_HAND[name]
    given = {
        "logprobs": logs(PI).requires_grad_(),
        "old_logprobs": logs(OLD),
        "rollout_logprobs": logs(BEHAVIOUR),
        "advantages": torch.tensor([[*A, math.nan]], dtype=torch.float64),
        "response_mask": torch.tensor([[True, True, True, False]]),
    }
    entry = POLICY_LOSSES[name]
    result = entry.target(**{column: given[column] for column in entry.signature.columns}, **parameters)
    assert result.per_token[0].tolist() == pytest.approx([*terms, 0.0], rel=1e-6)
    (gradient,) = torch.autograd.grad(result.per_token.sum(), given["logprobs"])
    assert gradient[0].tolist() == pytest.approx([*slopes, 0.0], rel=1e-6, abs=1e-12)


# -- gradients --


def _surrogates(batch: Batch, at: torch.Tensor) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """What the losses that stop a gradient on purpose differentiate: their constants, taken at ``at``."""
    mask, adv = batch.mask, select(batch.advantages, batch.mask)
    old = select(batch.old_logprobs, mask)
    here = select(at, mask)
    ratio = (here - old).exp()
    change = here.exp() - old.exp()
    rest = (1 - old.exp()) * ((1 - old.exp() + 1e-8) / (1 - here.exp() + 1e-8)).log()
    distance = old.exp() * (old - here) + rest
    inside = {
        "dppo_tv": torch.where(adv > 0, change <= 0.2, change >= -0.2),
        "dppo_kl": torch.where(adv > 0, (distance <= 0.2) | (change <= 0), (distance <= 0.2) | (change >= 0)),
    }
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    answer = select(here - old, mask).sum(-1, keepdim=True) / length

    def sequence(logprobs: torch.Tensor) -> torch.Tensor:
        s = (answer + select(logprobs, mask) - here).exp()
        return select(torch.maximum(-adv * s, -adv * s.clamp(0.8, 1.2)), mask)

    def region(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        weight = torch.where(inside[name], -adv * ratio.clamp(max=3.0), 0.0)
        return lambda logprobs: weight * select(logprobs, mask)

    return {
        "cispo": lambda logprobs: -adv * ratio.clamp(0.8, 1.2) * select(logprobs, mask),
        "gspo": sequence,
        "dppo_tv": region("dppo_tv"),
        "dppo_kl": region("dppo_kl"),
    }


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=6, deadline=None)
@given(batch=batches(), mode=st.sampled_from(MODES))
def test_the_gradient_matches_finite_differences_in_float64(name: str, batch: Batch, mode: Aggregation) -> None:
    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return loss_numerator(run_loss(name, batch, logprobs, weigh=False).per_token, batch.mask, mode)

    at = batch.logprobs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(at), at)
    stand_in = _surrogates(batch, batch.logprobs).get(name)

    def function(logprobs: torch.Tensor) -> torch.Tensor:
        return loss(logprobs) if stand_in is None else loss_numerator(stand_in(logprobs), batch.mask, mode)

    step = 1e-6
    for place in batch.mask.nonzero().tolist():
        nudge = torch.zeros_like(batch.logprobs)
        nudge[tuple(place)] = step
        slope = (function(batch.logprobs + nudge) - function(batch.logprobs - nudge)) / (2 * step)
        assert gradient[tuple(place)].item() == pytest.approx(slope.item(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=8, deadline=None)
@given(batch=batches())
def test_a_step_along_the_gradient_makes_good_tokens_likelier(name: str, batch: Batch) -> None:
    """On-policy, each loss pushes a token of positive advantage up and one of negative advantage down, or leaves it."""
    seq_advantage = batch.advantages[:, :1].expand_as(batch.advantages)
    same = dict.fromkeys(("logprobs", "old_logprobs", "rollout_logprobs"), batch.old_logprobs)
    constant = replace(batch, advantages=seq_advantage, **same)
    _, gradient = loss_and_gradient(name, constant, Aggregation.TOKEN_MEAN, splits(len(batch.mask), 1))
    assert bool((gradient * seq_advantage <= 1e-12).all())
    if name not in ("clip_cov", "kl_cov"):  # which may silence or bind any token
        assert bool((gradient != 0)[constant.mask & (seq_advantage != 0)].all())


# -- nothing but the samples matters --


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=12, deadline=None)
@given(batch=batches(), data=st.data())
def test_b18_neither_order_nor_micro_batches_nor_ranks_change_loss_or_gradient(
    name: str, batch: Batch, data: st.DataObject
) -> None:
    mode, samples = data.draw(st.sampled_from(MODES)), len(batch.mask)
    loss, gradient = loss_and_gradient(name, batch, mode, splits(samples, 1))
    order = torch.tensor(data.draw(st.permutations(range(samples))))
    cuts = [[order]]  # a loss that looks at the whole mini-batch gets it in one piece, in any order
    if name in SPLITTABLE:
        cuts += [[order[rows] for rows in splits(samples, parts)] for parts in (2, 4)]
        cuts += [
            [rows for rows in shard_rows(batch.mask.sum(-1), 2, balance) if len(rows)] for balance in (True, False)
        ]
    for cut in cuts:
        other_loss, other = loss_and_gradient(name, batch, mode, cut)
        assert other_loss == pytest.approx(loss, abs=1e-10)
        torch.testing.assert_close(other, gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("name", SPLITTABLE)
def test_b17_a_token_mean_counts_tokens_of_the_whole_batch(name: str, parts: int) -> None:
    """Answers of 10 and 90 tokens: each token has a hundredth of the loss, whichever micro-batch it is in."""
    mask = torch.arange(90).unsqueeze(0) < torch.tensor([[10], [90], [0], [0]])
    level = torch.full((4, 90), -0.7, dtype=torch.float64)
    advantages = torch.zeros(4, 90, dtype=torch.float64)
    advantages[0] = 1.0  # the long answer teaches nothing
    batch = Batch(level, level, level, advantages, level, level, level.exp(), mask, mask[:, 0].long(), level[:, :2])
    batch = replace(batch, weights=torch.ones_like(level))
    loss, gradient = loss_and_gradient(name, batch, Aggregation.TOKEN_MEAN, splits(4, parts))
    alone = run_loss(name, batch.rows(torch.tensor([0])), level[:1]).per_token.sum().item()
    assert loss == pytest.approx(alone / 100)
    assert gradient[0, :10].tolist() == pytest.approx([-1 / 100] * 10)


def test_losses_that_compare_tokens_of_the_mini_batch_say_so() -> None:
    for name in LOSSES:
        whole = POLICY_LOSSES[name].traits.get("whole_mini_batch", False)
        assert whole == (POLICY_LOSSES[name].scope is Scope.PARTITION) == (name not in SPLITTABLE)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=6, deadline=None)
@given(batch=batches(), fill=st.sampled_from([math.nan, -math.inf, 0.0]))
def test_b19_the_padded_width_changes_no_loss_and_no_gradient(name: str, batch: Batch, fill: float) -> None:
    width, whole = batch.mask.shape[1], splits(len(batch.mask), 1)
    for mode in MODES:
        results = [loss_and_gradient(name, batch.padded(to - width, fill), mode, whole) for to in (width, 32, 64)]
        for loss, gradient in results[1:]:
            assert loss == pytest.approx(results[0][0], abs=1e-12)
            torch.testing.assert_close(gradient[:, :width], results[0][1], rtol=0, atol=1e-12)
            assert not gradient[:, width:].any()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=6, deadline=None)
@given(batch=batches(), mode=st.sampled_from(MODES))
def test_b21_masked_entries_reach_neither_loss_nor_gradient(
    name: str, poison: float, batch: Batch, mode: Aggregation
) -> None:
    whole = splits(len(batch.mask), 1)
    loss, gradient = loss_and_gradient(name, batch, mode, whole)
    poisoned_loss, poisoned = loss_and_gradient(name, batch.with_masked(poison), mode, whole)
    assert poisoned_loss == pytest.approx(loss, abs=1e-12)
    assert math.isfinite(loss)
    torch.testing.assert_close(poisoned, gradient, rtol=0, atol=1e-12)
    assert not poisoned[~batch.mask].any()


def three_tokens(name: str, **changes: torch.Tensor) -> torch.Tensor:
    """The terms of one answer whose third token is masked."""
    plain = torch.full((1, 3), -0.7, dtype=torch.float64)
    columns = {"logprobs": plain, "old_logprobs": plain, "rollout_logprobs": plain, "tis_weights": plain.exp()}
    columns |= {"advantages": torch.tensor([[1.0, -1.0, 0.5]]).double(), **changes}
    signature = POLICY_LOSSES[name].signature
    optional = [column for column in signature.optional_columns if column in changes]
    mask = torch.tensor([[True, True, False]])
    wanted = {c: columns[c] for c in (*signature.columns, *optional) if c != "response_mask"}
    return POLICY_LOSSES[name].target(**wanted, response_mask=mask, **PARAMETERS.get(name, {})).per_token


@pytest.mark.parametrize("column", ["logprobs", "old_logprobs", "rollout_logprobs", "advantages", "tis_weights"])
@pytest.mark.parametrize("name", LOSSES)
def test_b21_a_nan_that_is_trained_on_is_not_hidden(name: str, column: str) -> None:
    signature = POLICY_LOSSES[name].signature
    if column not in (*signature.columns, *signature.optional_columns):
        assert column not in ("logprobs", "advantages")
        return
    broken = torch.full((1, 3), -0.7, dtype=torch.float64)
    broken[0, 1] = math.nan
    assert bool(three_tokens(name, **{column: broken}).isnan().any())


@pytest.mark.parametrize("name", LOSSES)
def test_b06_masked_advantages_reach_no_loss_of_whole_answers(name: str) -> None:
    mask = torch.tensor([[1, 1, 0, 0]]).bool()
    results = []
    for tail in (0.0, 10.0):
        level = torch.full((1, 4), -0.7, dtype=torch.float64)
        advantages = torch.tensor([[1.0, 1.0, tail, tail]]).double()
        logprobs = torch.tensor([[-0.5, -1.0, -0.2, -0.3]], dtype=torch.float64, requires_grad=True)
        batch = Batch(logprobs, level, level, advantages, level, level, level.exp(), mask, mask[:, 0].long(), level)
        loss = loss_numerator(run_loss(name, batch, logprobs).per_token, mask, "seq-mean-token-mean")
        results.append((loss.item(), torch.autograd.grad(loss, logprobs)[0]))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_nothing_to_train_is_a_loss_of_zero(name: str, mode: Aggregation) -> None:
    nothing = torch.full((2, 3), math.nan, dtype=torch.float64)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    batch = Batch(*[nothing] * 7, mask, torch.zeros(2, dtype=torch.int64), nothing[:, :2])
    loss, gradient = loss_and_gradient(name, batch, mode, splits(2, 1))
    assert loss == 0.0
    assert not gradient.any()


# -- with a KL --


@pytest.mark.parametrize("name", LOSSES)
def test_b24_a_step_on_the_kl_term_reduces_the_kl(name: str) -> None:
    """Advantage 0, coefficient 1, every estimator with a gradient; many samples of a policy over five tokens."""
    random = torch.Generator().manual_seed(3)
    reference = torch.randn(5, generator=random, dtype=torch.float64).log_softmax(0)
    start = torch.randn(5, generator=random, dtype=torch.float64)
    arms = torch.multinomial(start.softmax(0), 4000, replacement=True, generator=random)
    mask, zeros = torch.ones(4000, 1, dtype=torch.bool), torch.zeros(4000, 1, dtype=torch.float64)

    def kl(logits: torch.Tensor) -> float:
        logprobs = logits.log_softmax(0)
        return float((logprobs.exp() * (logprobs - reference)).sum())

    for kind in own(KL_TYPES):
        if kind in ("k1", "kl", "abs"):
            continue  # their gradient has mean 0, or is that of another distance: for the reward
        logits = start.clone().requires_grad_()
        logprobs = logits.log_softmax(0)[arms].unsqueeze(1)
        columns = {"response_mask": mask, "advantages": zeros, "ref_logprobs": reference[arms].unsqueeze(1)}
        columns["rollout_logprobs"] = columns["old_logprobs"] = logprobs.detach()
        objective = PolicyObjective(name, PARAMETERS.get(name, {}), kl_type=kind, kl_coef=1.0)
        loss = objective.numerator(columns, logprobs, None).loss / denominator("token-mean", count(mask))
        (gradient,) = torch.autograd.grad(loss, logits)
        assert kl(start - 0.05 * gradient) < kl(start) - 1e-4, kind
