"""The built-in scorers, and what scorers may ask for."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import DataError, TandemError
from tandem.reward.outcome import Outcome, Sample
from tandem.reward.registry import call_style
from tandem.reward.resolve import bind, resolve
from tandem.reward.scorers.rules import exact, keyword, length_penalty, match_fraction
from tandem.reward.scoring import bind_target, run_now


def test_exact() -> None:
    assert exact(" 42\n", 42) == 1.0
    assert exact("4 2", "42") == 0.0
    assert exact("42<end> more", "42", stop="<end>") == 1.0
    assert exact("42", "42", stop="") == 1.0
    with pytest.raises(DataError, match=r"data\.answer_key"):
        exact("42", None)


def test_keyword() -> None:
    assert keyword("回答正确。", keyword="正确") == 1.0
    assert keyword("", keyword="正确") == 0.0


@given(st.text(max_size=8), st.text(max_size=8))
def test_match_fraction_is_one_for_the_truth_only(response, truth) -> None:
    fraction = match_fraction(response, truth)
    assert 0.0 <= fraction <= 1.0
    assert (fraction == 1.0) == (response == truth)


def test_match_fraction_counts_positions() -> None:
    assert match_fraction("7717", "7777") == 0.75
    assert match_fraction("77777777", "7777") == 0.5
    assert match_fraction("77", "7777") == 0.5


def test_length_penalty_is_linear_beyond_the_target() -> None:
    lengths = [0, 80, 90, 100, 1000]
    assert [length_penalty(n, target=80, over=20, penalty=2.0) for n in lengths] == [0.0, 0.0, -1.0, -2.0, -2.0]
    with pytest.raises(ValueError, match="over = 0"):
        length_penalty(1, target=0, over=0)


def test_weighted_sum_adds_and_reports_its_parts() -> None:
    parts = [
        {"type": "gsm8k", "weight": 1.0},
        {"type": "length_penalty", "weight": 0.5, "target": 0, "over": 10, "name": "short"},
    ]
    scorer = bind(resolve("weighted_sum", None, {"parts": parts}))
    assert set(scorer.call.fields) == {"response", "ground_truth", "response_length"}
    verdict = run_now(scorer.score(Sample("#### 5", "5", response_length=4)))
    assert verdict.reward == pytest.approx(1.0 - 0.5 * 0.4)
    assert verdict.metrics == {"gsm8k": 1.0, "short": pytest.approx(-0.4)}
    assert verdict.components == (1.0, pytest.approx(-0.2))
    assert sum(verdict.components) == verdict.reward


def test_weighted_sum_fails_with_the_part_that_failed() -> None:
    parts = [{"type": "keyword", "keyword": "a"}, {"type": "gsm8k"}]
    verdict = run_now(bind(resolve("weighted_sum", None, {"parts": parts})).score(Sample("a", "no number")))
    assert verdict.outcome is Outcome.FAILED
    assert verdict.reason.startswith("gsm8k: DataError: ground_truth 'no number' has no number")


def test_a_class_may_score_single_samples_and_keep_state() -> None:
    class Counting:
        def __init__(self, step: float = 1.0) -> None:
            self.total, self.step = 0.0, step

        async def __call__(self, response: str) -> float:
            self.total += self.step
            return self.total

    scorer = bind_target(Counting, "counting", {"step": 2.0})
    assert scorer.call.fields == ("response",)
    assert scorer.call.is_async
    assert not scorer.call.is_batch
    assert [run_now(scorer.score(Sample("x"))).reward for _ in range(3)] == [2.0, 4.0, 6.0]


def test_a_batch_is_known_by_its_one_required_parameter() -> None:
    class Manager:
        def __call__(self, data, return_dict=False):
            return [0.0]

    assert call_style(Manager, "manager").is_batch
    assert call_style(Manager(), "manager").is_batch


def test_what_no_sample_has_is_refused_with_the_near_name() -> None:
    def wrong(respons: str) -> float:
        return 0.0

    with pytest.raises(TandemError, match="no sample has 'respons': did you mean 'response'"):
        call_style(wrong, "wrong")

    class NotCalled:
        pass

    with pytest.raises(TandemError, match="class NotCalled needs __call__"):
        call_style(NotCalled, "not_called")


def test_scoring_needs_no_torch() -> None:
    code = (
        "import sys; from tandem.reward import resolve; from tandem.reward.process import pool, worker; "
        "spec = resolve.resolve('gsm8k'); resolve.bind(spec); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
