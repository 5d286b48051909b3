"""Evaluation: unbiased pass@k, means over samples, failures left out and counted, equal weights give equal answers."""

from __future__ import annotations

from itertools import combinations
from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.columns.proto import DataProto
from tandem.config.schema import EvaluationConfig
from tandem.data.prompts import Prompt
from tandem.reward.outcome import Verdict, failed
from tandem.roles.evaluation import Answer, Evaluator, pass_at_k
from tandem.roles.reward import RewardManager
from tandem.roles.rollout.generation import evaluation_sampling
from tandem.rollout.protocol import Sampling
from tests.roles.fake_roles import LENGTH, FakeEngine, FakeScoring, FakeTokenizer, by_sample

TRAINING = Sampling(n=8, max_tokens=LENGTH, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(0, 3))


def evaluator(judge=by_sample, *, n: int = 4, k: tuple[int, ...] = (), sources: tuple[str, ...] = ("a",), **options):  # type: ignore[no-untyped-def]
    prompts = [Prompt(f"v{i}", (i + 1,), f"held out {i}", str(i), source) for i, source in enumerate(sources)]
    engine = options.pop("engine", FakeEngine())
    rewards = RewardManager(FakeScoring(judge))
    return Evaluator(engine, prompts, Sampling(n=n, max_tokens=LENGTH), rewards, FakeTokenizer(), k=k, **options)


@given(st.data())
def test_pass_at_k_is_the_share_of_choices_that_hold_a_solution(data: st.DataObject) -> None:
    solved = data.draw(st.lists(st.booleans(), min_size=1, max_size=7))
    k = data.draw(st.integers(1, len(solved)))
    chosen = list(combinations(solved, k))
    expected = sum(any(choice) for choice in chosen) / len(chosen)
    assert pass_at_k(sum(solved), len(solved), k) == pytest.approx(expected)


def test_means_and_passes() -> None:
    def judge(group: DataProto, i: int) -> Verdict:
        solves = {"v0": 4, "v1": 1, "v2": 0}[group.non_tensor_batch["uid"][0]]
        return Verdict(1.0 if i < solves else 0.25)

    made = evaluator(judge, k=(1, 4), sources=("a", "a", "b"))
    metrics = made.metrics(made.answers())
    assert metrics["eval/reward"] == metrics["eval/mean@4"] == pytest.approx((4 + 1 + 3 * 0.25 + 1) / 12)
    assert metrics["eval/pass@1"] == pytest.approx((1 + 0.25 + 0) / 3)
    assert metrics["eval/pass@4"] == pytest.approx(2 / 3)
    assert metrics["eval/reward/b"] == 0.25
    assert metrics["eval/length"] == LENGTH
    assert metrics["eval/failed"] == 0


def test_failed_scorings_count_in_no_mean() -> None:
    made = evaluator(lambda group, i: Verdict(1.0) if i == 0 else failed("broken"), k=(1, 2))
    metrics = made.metrics(made.answers())
    assert (metrics["eval/reward"], metrics["eval/pass@1"], metrics["eval/failed"]) == (1.0, 1.0, 3.0)
    assert isnan(metrics["eval/pass@2"])  # one valid sample says nothing about two


@pytest.mark.parametrize("at_once", [1, 3])
def test_answers_stand_in_the_order_of_the_prompts_and_repeat(at_once: int) -> None:
    sources = ("a",) * 5
    plain = evaluator(sources=sources, n=2).answers()
    made = evaluator(sources=sources, n=2, engine=FakeEngine(at_once=at_once, pick=lambda count: count - 1))
    answers = made.answers()
    assert answers == plain == made.answers()
    assert [group[0].prompt.uid for group in answers] == [f"v{i}" for i in range(5)]
    assert isinstance(answers[0][0], Answer)
    assert evaluator(sources=sources, n=2, seed=1).answers() != plain


def test_evaluation_has_sampling_settings_of_its_own() -> None:
    greedy = evaluation_sampling(EvaluationConfig(), TRAINING)
    assert greedy.greedy and greedy.n == 1
    sampled = evaluation_sampling(EvaluationConfig(temperature=0.3, n=5, top_p=0.8), TRAINING)
    assert sampled.logprobs_of == "either"  # so that an engine that tells of one distribution alone can answer
    assert (sampled.greedy, sampled.temperature, sampled.n, sampled.top_p, sampled.top_k) == (False, 0.3, 5, 0.8, -1)
    for sampling in (greedy, sampled):
        assert sampling.max_tokens == LENGTH
        assert sampling.stop_token_ids == (0, 3)
