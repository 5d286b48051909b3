"""Every return value becomes a number or a reason."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import RewardError
from tandem.reward.outcome import Outcome, Scores, Verdict, apply_policy, as_verdict, as_verdicts, failed, timed_out


class Hostile:
    def __float__(self) -> float:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "reward"),
    [(1, 1.0), (True, 1.0), (-0.5, -0.5), (np.float32(0.25), 0.25), (torch.tensor(2.0), 2.0), (Fraction(1, 2), 0.5)],
)
def test_numbers_are_scored(value, reward) -> None:
    assert as_verdict(value) == Verdict(reward)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "returned None, not a number"),
        ("1.0", "returned str '1.0', not a number"),
        (b"1", "bytes"),
        (math.nan, "not a finite number"),
        (math.inf, "not a finite number"),
        (1e39, "returned 1e+39, which is beyond float32"),
        (np.float64(-1e300), "beyond float32"),
        ({"score": 1e39}, "beyond float32"),
        (10**400, "not a number"),
        ([1.0], "type list"),
        (1j, "type complex"),
        (torch.zeros(2), "type Tensor"),
        (Hostile(), "type Hostile"),
        ({}, "without 'score'"),
        ({"score": "high"}, "str 'high'"),
    ],
)
def test_b75_b12_what_is_no_finite_number_is_a_failure_never_a_zero(value, reason) -> None:
    verdict = as_verdict(value)
    assert verdict.outcome is Outcome.FAILED
    assert math.isnan(verdict.reward)
    assert reason in verdict.reason


def test_a_dict_gives_metrics_and_notes() -> None:
    verdict = as_verdict({"score": 1, "format": True, "length": np.int64(3), "note": "text", "bad": math.nan})
    assert verdict == Verdict(1.0, metrics={"format": 1.0, "length": 3.0}, notes={"note": "text"})


@pytest.mark.parametrize("values", [torch.tensor([1.0, 0.5]), np.array([1.0, 0.5]), [1.0, 0.5], (1, 0.5)])
def test_a_batch_of_numbers_is_scored(values) -> None:
    assert [v.reward for v in as_verdicts(values, 2)] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (torch.zeros(3), "3 rewards for 2 samples"),
        ([], "0 rewards for 2 samples"),
        (torch.tensor(1.0), "not 2 numbers"),
        (torch.zeros(2, 1), "type list"),
        (None, "returned None, not 2 numbers"),
        ("ab", "not 2 numbers"),
    ],
)
def test_b75_a_batch_of_another_shape_fails_as_a_whole(values, reason) -> None:
    verdicts = as_verdicts(values, 2)
    assert [v.outcome for v in verdicts] == [Outcome.FAILED] * 2
    assert all(reason in v.reason for v in verdicts)


def test_b12_one_valid_reward_of_eight_is_valid_alone() -> None:
    scores = Scores.of(as_verdicts([math.nan, None, 1.0, math.nan, "x", math.inf, None, math.nan], 8), "g")
    assert scores.valid == tuple(i == 2 for i in range(8))
    assert apply_policy(scores, "mask").valid == scores.valid
    assert apply_policy(scores, "refill").refill == (0, 1, 3, 4, 5, 6, 7)
    assert scores.report() == {"scored": 1.0, "failed": 7.0, "timed_out": 0.0}


@given(st.lists(st.sampled_from(list(Outcome)), min_size=1))
def test_every_sample_is_valid_or_refilled(outcomes) -> None:
    verdicts = {Outcome.SCORED: Verdict(1.0), Outcome.FAILED: failed("it broke"), Outcome.TIMED_OUT: timed_out(3.0)}
    scores = Scores.of([verdicts[outcome] for outcome in outcomes], "g")
    treatment = apply_policy(scores, "refill")
    assert {i for i, valid in enumerate(treatment.valid) if not valid} == set(treatment.refill)
    assert apply_policy(scores, "mask").refill == ()
    report = scores.report()
    assert report["scored"] + report["failed"] + report["timed_out"] == len(outcomes)
    if all(treatment.valid):
        assert apply_policy(scores, "stop") == treatment
    else:
        with pytest.raises(RewardError):
            apply_policy(scores, "stop")


def test_stop_names_sample_reason_and_remedy() -> None:
    scores = Scores.of([Verdict(1.0), failed("KeyError: 'answer'"), timed_out(3.0)], "train_4/ticket_7")
    with pytest.raises(RewardError, match=r"train_4/ticket_7\[1\] \(2 of 3 .* KeyError: 'answer'.*on_error: mask"):
        apply_policy(scores, "stop")
    with pytest.raises(RewardError, match=r"not scored within 3 s\. Raise reward_manager\.timeout_s"):
        apply_policy(Scores.of([timed_out(3.0)], "g"), "stop")


def test_scores_of_groups_join_in_order() -> None:
    joined = Scores.joined([Scores.of([Verdict(1.0, metrics={"m": 2.0})], "a"), Scores.of([failed("x")], "b")])
    assert joined.names == ("a[0]", "b[0]")
    assert joined.valid == (True, False)
    assert joined.report() == {"scored": 1.0, "failed": 1.0, "timed_out": 0.0, "m": 2.0}
    assert len(Scores.joined([])) == 0
