"""What holds for every registered advantage estimator: one case by hand, and what may not change it.

An estimator that is added is covered by itself, except that ``BY_HAND`` asks for its case.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms import ADVANTAGES
from tandem.base.registry import Scope
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.config.schema import AlgorithmConfig
from tandem.roles.advantages import AdvantageStage
from tests.algorithms.batches import Batch, batches
from tests.algorithms.entries import ESTIMATORS, GROUPED, run_estimator, run_or_refuse

# -- by hand --

MASK = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0]]).bool()
BASE: dict[str, torch.Tensor] = {
    # Two groups of two; the scores 1, 0 and 2, 6 lie on the last trained token, and nothing counts where it is masked.
    "token_rewards": torch.tensor([[0, 1], [0, math.nan], [0, 2], [6, math.nan]]).double(),
    "response_mask": MASK,
    "group_ids": torch.tensor([7, 7, 3, 3]),
    "values": torch.tensor([[0.5, 0.25], [1, math.nan], [0, 1], [2, math.nan]]).double(),
    "old_logprobs": torch.tensor([[0.5, 0.25], [0.8, math.nan], [0.5, 0.5], [0.5, math.nan]]).double().log(),
    "sum_pi_squared": torch.tensor([[0.5, 0.5], [0.7, math.nan], [0.5, 0.5], [0.5, math.nan]]).double(),
    "reward_baselines": torch.tensor([0.5, 0.5, 1.0, 1.0]).double(),
    "reward_components": torch.tensor([[1, 0], [0, 2], [2, 5], [6, 5]]).double(),
}
H = math.sqrt(0.5)  # a group of two, normalised by its spread
ENERGETIC = [[1 - 5 / 6, 1.0], [-5 / 6], [-2.0, 2.0], [2.0]]
"""Energies 1 - 2 pi + sum pi^2, summed along the answer: 0.5, 1.5 and 0.1; 0.5, 1 and 0.5. Baselines at the first token
(1 x 0.5 + 0 x 0.1) / 0.6 and (2 x 0.5 + 6 x 0.5) / 1; at the second, which one answer reaches, 0."""


def white(values: list[list[float]]) -> list[list[float]]:
    """Shifted to mean 0 and scaled to variance 1 over the six tokens."""
    flat = torch.tensor([v for row in values for v in row]).double()
    return [[(v - float(flat.mean())) / float(flat.std()) for v in row] for row in values]


BY_HAND: dict[str, tuple[dict[str, Any], list[list[float]]]] = {
    "grpo": ({"epsilon": 0.0}, [[H, H], [-H], [-H, -H], [H]]),
    "dr_grpo": ({}, [[0.5, 0.5], [-0.5], [-2, -2], [2]]),
    "rloo": ({}, [[1, 1], [-1], [-4, -4], [4]]),
    "grpo_passk": ({"norm_adv_by_std": False}, [[1, 1], [0], [0, 0], [4]]),
    "opo": ({}, [[1 / 3, 1 / 3], [-2 / 3], [-4 / 3, -4 / 3], [8 / 3]]),  # baselines 2 / 3 and 10 / 3
    "gpg": ({"f_norm": 2.0}, [[1 / 3, 1 / 3], [-1 / 3], [-4 / 3, -4 / 3], [4 / 3]]),  # times 4 / 3 / 2
    "reinforce_plus_plus": ({"gamma": 0.5}, white([[0.5, 1], [0], [1, 2], [6]])),
    "reinforce_plus_plus_baseline": ({}, white([[0.5, 0.5], [-0.5], [-2, -2], [2]])),
    "gae": ({"gamma": 0.5, "lam": 0.5}, white([[-0.1875, 0.75], [-1], [0.75, 1], [4]])),
    "gdpo": ({"weights": [1.0, 0.5]}, white([[H / 2, H / 2], [-H / 2], [-H, -H], [H]])),  # the last two tie in one part
    "remax": ({}, [[0.5, 0.5], [-0.5], [1, 1], [5]]),
    "optimal_token_baseline": ({}, ENERGETIC),
    "tir_optimal_token_baseline": ({}, ENERGETIC),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_by_hand(name: str) -> None:
    parameters, expected = BY_HAND[name]
    entry = ADVANTAGES[name]
    advantages, _ = entry.target(**{column: BASE[column] for column in entry.signature.columns}, **parameters)
    assert advantages[MASK].tolist() == pytest.approx([v for row in expected for v in row], rel=1e-5, abs=1e-7)
    assert not advantages[~MASK].any()


# -- nothing but the samples matters --


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_b09_order_padding_and_masked_entries_do_not_matter(name: str, data: st.DataObject) -> None:
    batch = data.draw(batches())
    order = torch.tensor(data.draw(st.permutations(range(len(batch.mask)))))
    reference = run_or_refuse(name, batch)
    if reference is None:
        return
    width, straight = batch.mask.shape[1], torch.arange(len(batch.mask))
    for other, back in [
        (batch.rows(order), torch.argsort(order)),
        (batch.padded(3, math.nan), straight),
        *((batch.with_masked(fill), straight) for fill in (math.nan, math.inf, -math.inf, 1e30)),
    ]:
        for ours, want in zip(run_estimator(name, other), reference, strict=True):
            torch.testing.assert_close(ours[back][:, :width], want, rtol=1e-9, atol=1e-9)
            assert not ours[:, width:].any()


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if ADVANTAGES[n].scope <= Scope.GROUP])
@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_group_scope_means_that_whole_groups_may_be_computed_apart(name: str, batch: Batch) -> None:
    whole, _ = run_estimator(name, batch)
    for group in batch.group_ids.unique():
        rows = (batch.group_ids == group).nonzero().flatten()
        torch.testing.assert_close(run_estimator(name, batch.rows(rows))[0], whole[rows], rtol=1e-9, atol=1e-9)


def scored(scores: list[float], group_ids: list[int], width: int = 1) -> Batch:
    """Answers of one token and, masked, more; the score is on the token and is each of the reward's two parts."""
    rewards = torch.zeros(len(scores), width).double()
    rewards[:, 0] = torch.tensor(scores)
    mask = torch.zeros(len(scores), width, dtype=torch.bool)
    mask[:, 0] = True
    level = torch.full_like(rewards, -0.7)
    parts = rewards[:, :1].expand(-1, 2)
    ids = torch.tensor(group_ids)
    return Batch(level, level, level, rewards, rewards, level, level.exp(), mask, ids, parts)


@pytest.mark.parametrize("slices", [1, 2, 4, 8])
@pytest.mark.parametrize("name", [*GROUPED, "remax"])
def test_b01_constant_groups_give_zero_however_the_batch_is_sliced(name: str, slices: int) -> None:
    owners = [group for group in range(4) for _ in range(8)]
    batch = scored([float(group) for group in owners], owners)
    for rows in torch.arange(32).tensor_split(slices):
        torch.testing.assert_close(
            run_estimator(name, batch.rows(rows))[0], torch.zeros(len(rows), 1).double(), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("reward", [1.0, 0.1, 1 / 3, -3.7, 1e4])
@pytest.mark.parametrize("name", GROUPED)
def test_flat_groups_of_any_length_and_reward_are_exactly_still(name: str, reward: float) -> None:
    """Not nearly: what is left of rounding is divided by a small spread and moves weights as a real step does."""
    owners = [0] * 7 + [1] * 3 + [2] * 5
    batch = scored([reward * (group + 1) for group in owners], owners, width=6)
    lengths = torch.arange(15) % 5 + 1
    batch = replace(batch, mask=torch.arange(6) < lengths.unsqueeze(-1))
    for one in (batch, batch.map(lambda c: c.float() if c.is_floating_point() else c, tokens_only=False)):
        advantages, _ = run_estimator(name, one)
        assert not advantages.any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_b03_a_square_batch_takes_statistics_along_samples(name: str) -> None:
    """As many tokens as samples: what broadcasts along the wrong axis shows beside the same batch, wider."""
    random = torch.Generator().manual_seed(5)
    columns = [torch.randn(3, 3, generator=random, dtype=torch.float64) for _ in range(7)]
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool()
    batch = Batch(*columns, mask, torch.zeros(3, dtype=torch.int64), columns[0][:, :2])
    for square, wide in zip(run_estimator(name, batch), run_estimator(name, batch.padded(4, 9.0)), strict=True):
        torch.testing.assert_close(square, wide[:, :3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_b03_who_compares_samples_of_a_group_declares_it(name: str) -> None:
    assert (name in GROUPED) == ("group_ids" in ADVANTAGES[name].signature.columns)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=15, deadline=None)
@given(batch=batches(empty=False), reward=st.floats(-1e3, 1e3))
def test_b04_a_sample_without_trained_tokens_moves_nobody(name: str, batch: Batch, reward: float) -> None:
    alone = run_or_refuse(name, batch)
    first = batch.rows(torch.tensor([0]))
    nothing = replace(
        first, mask=torch.zeros_like(first.mask), token_rewards=torch.full_like(first.token_rewards, reward)
    )
    joined = Batch(**{column: torch.cat([getattr(batch, column), getattr(nothing, column)]) for column in vars(batch)})
    if alone is None:
        return
    for ours, want in zip(run_estimator(name, joined), alone, strict=True):
        torch.testing.assert_close(ours[:-1], want, rtol=1e-9, atol=1e-9)
        assert not ours[-1].any()


def stage_batch(lengths: list[int], rewards: list[float]) -> DataProto:
    """Groups of neighbours in twos, as the stage gets them."""
    mask = Ragged.from_lengths(torch.ones(sum(lengths), dtype=torch.bool), lengths)
    count, level = len(lengths), torch.full((sum(lengths),), -0.7)
    scores = torch.tensor(rewards)
    return DataProto(
        {
            "responses": mask.like(torch.ones(sum(lengths), dtype=torch.int64)),
            "response_mask": mask,
            "rewards": scores,
            "reward_valid": scores.isfinite(),
            "group_ids": torch.arange(count) // 2,
            "values": mask.like(level),
            "old_logprobs": mask.like(level),
            "sum_pi_squared": mask.like(level.exp()),
            "reward_baselines": torch.zeros(count),
            "reward_components": scores.unsqueeze(-1).expand(-1, 2).clone(),
        }
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_b07_the_reward_of_an_empty_answer_reaches_neither_it_nor_its_peers(name: str) -> None:
    stage = AdvantageStage.of(AlgorithmConfig.model_validate({"adv_estimator": name}))
    results = [stage(stage_batch([2, 3, 2, 0], [1.0, 0.0, 0.5, reward])) for reward in (10.0, -3.0)]
    for result in results:
        assert result.ragged("token_rewards").lengths.tolist() == [2, 3, 2, 0]
        assert torch.equal(result.ragged("advantages").values, results[0].ragged("advantages").values)
        if name in GROUPED:
            assert not result.ragged("advantages")[2].any()  # left without a peer


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=15, deadline=None)
@given(batch=batches(), data=st.data())
def test_b10_group_ids_hold_after_samples_were_dropped(name: str, batch: Batch, data: st.DataObject) -> None:
    """Dropped from the batch, or told to count in nothing: the same for all that are left."""
    kept = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(batch.mask), max_size=len(batch.mask))))
    left = run_or_refuse(name, batch.rows(kept.nonzero().flatten())) if bool(kept.any()) else None
    if left is None:
        return
    told = run_estimator(name, replace(batch, mask=batch.mask & kept.unsqueeze(-1)))
    torch.testing.assert_close(told[0][kept], left[0], rtol=1e-9, atol=1e-9)
    if "reward_valid" in ADVANTAGES[name].signature.optional_columns:
        flagged = run_estimator(name, batch, valid=kept)
        torch.testing.assert_close(flagged[0][kept], left[0], rtol=1e-9, atol=1e-9)
        assert not flagged[0][~kept].any()


@pytest.mark.parametrize("by_flag", [True, False], ids=["reward_valid", "NaN rewards"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_b12_one_valid_reward_in_a_group_is_no_comparison_and_never_a_nan(name: str, by_flag: bool) -> None:
    batch = scored([1.0] + [3.0 if by_flag else math.nan] * 7 + [2.0, 5.0], [5] * 8 + [6] * 2)
    batch = replace(batch, components=batch.components + 1)  # which are a greedy answer's score, too
    valid = torch.tensor([True] + [False] * 7 + [True] * 2)
    if by_flag and "reward_valid" not in ADVANTAGES[name].signature.optional_columns:
        return
    advantages, returns = run_estimator(name, batch, valid=valid if by_flag else None)
    assert bool(advantages.isfinite().all()) and bool(returns.isfinite().all())
    assert not advantages[1:8].any()
    if name in GROUPED:
        assert not advantages[0].any()
    assert bool(advantages[8:].any())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_b12_a_partition_with_one_token_that_counts_is_no_end_of_the_run(name: str) -> None:
    batch = scored([1.0, 3.0], [0, 0])
    first = torch.zeros_like(batch.mask)
    first[:, 0] = True
    batch = replace(batch, mask=first, components=batch.components + 1)
    if "reward_valid" in ADVANTAGES[name].signature.optional_columns:
        advantages, returns = run_estimator(name, batch, valid=torch.tensor([True, False]))
        assert bool(advantages.isfinite().all()) and bool(returns.isfinite().all())
        assert not advantages[1].any()
        if name in GROUPED or "whiten" in (ADVANTAGES[name].target.__doc__ or ""):
            assert not advantages.any()


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "optimal_token_baseline"])
@settings(max_examples=15, deadline=None)
@given(batch=batches(empty=False), data=st.data())
def test_b13_observations_between_trained_tokens_change_nothing(name: str, batch: Batch, data: st.DataObject) -> None:
    """The plain token baseline is left out: it compares places, which is why it has a multi-turn form."""
    samples, width = batch.mask.shape
    order = (~batch.mask).long().argsort(dim=-1, stable=True)  # holes to the end, then each token to a place of its own
    compact = batch.map(lambda column: column.gather(-1, order))
    places = torch.tensor(
        [sorted(data.draw(st.permutations(range(width + 3)))[:width]) for _ in range(samples)], dtype=torch.int64
    )

    def spread(column: torch.Tensor) -> torch.Tensor:
        fill = torch.zeros(samples, width + 3, dtype=column.dtype)
        return fill.scatter(1, places, column)

    reference = run_or_refuse(name, compact)
    if reference is None:
        return
    for ours, want in zip(run_estimator(name, compact.map(spread)), reference, strict=True):
        torch.testing.assert_close(ours.gather(1, places), want, rtol=1e-9, atol=1e-9)
