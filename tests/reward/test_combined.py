"""One scorer made of others: chosen by data source, nested, in processes and in batches."""

from __future__ import annotations

import pytest

from tandem.base.deadline import Deadline
from tandem.reward.outcome import Outcome, Sample
from tandem.reward.parts import component_names
from tandem.reward.process.inline import InlineScoring
from tandem.reward.process.pool import ScoringPool
from tandem.reward.resolve import bind, problems, resolve
from tandem.reward.scoring import run_now
from tests.reward.test_pool import FILE, batch

ROUTES = {
    "routes": [
        {"source": "books/*", "type": "exact"},
        {"source": ["films", "plays"], "type": "keyword", "keyword": "end"},
        {"source": "*", "type": "weighted_sum", "parts": [{"type": "exact", "weight": 2.0}]},
    ]
}


@pytest.mark.parametrize(
    ("source", "response", "reward"),
    [("books/a", "x", 1.0), ("plays", "the end", 1.0), ("films", "x", 0.0), ("other", "x", 2.0), (None, "x", 2.0)],
)
def test_the_first_route_that_fits_scores(source, response, reward) -> None:
    scorer = bind(resolve("by_source", None, ROUTES))
    assert run_now(scorer.score(Sample(response, "x", data_source=source))).reward == reward


@pytest.mark.parametrize(
    ("source", "response"),
    [
        ("openai/gsm8k", "#### 5"),
        ("lighteval/MATH", r"\boxed{5}"),
        ("HuggingFaceH4/MATH-500", r"\boxed{5}"),
        ("math_dapo", "Answer: 5"),
        ("aime2024", "Answer: 5"),
        ("numina_olympiads", "the answer is 5"),
        ("searchR1_nq", "<answer>5</answer>"),
    ],
)
def test_well_known_data_sets_need_no_routes(source, response) -> None:
    scorer = bind(resolve("by_source"))
    assert run_now(scorer.score(Sample(response, "5", data_source=source))).reward == 1.0
    lost = run_now(scorer.score(Sample(response, "5", data_source="my_data")))
    assert lost.outcome is Outcome.FAILED
    assert "no route is for data_source 'my_data'; there are openai/gsm8k" in lost.reason


def test_routes_work_in_processes_and_over_batches() -> None:
    with ScoringPool(resolve("by_source", None, ROUTES), deadline_s=10.0) as pool:
        rows = [Sample("x", "x", data_source="books/a"), Sample("x", "x"), Sample("end", data_source="films")]
        assert pool.collect(pool.submit(rows), Deadline(60)).rewards == (1.0, 2.0, 1.0)
    mixed = {"routes": [{"source": "a", "type": "decoding", "file": FILE}, {"source": "b", "type": "exact"}]}
    with InlineScoring(bind(resolve("by_source", None, mixed))) as scoring:
        data = batch("7", "x", "12", "7", data_source=["b", "b", "a", "c"], ground_truth=["7", "7", "", ""])
        scores = scoring.collect(scoring.submit(data), Deadline(1))
    assert scores.rewards[:3] == (1.0, 0.0, 0.0)
    assert scores.outcomes[3] is Outcome.FAILED


@pytest.mark.parametrize(
    ("routes", "key", "reason"),
    [
        ([], "routes", "no route"),
        ("x", "routes", "no route"),
        ([{"type": "exact"}], "routes[0].source", "for which data_source"),
        ([{"source": [1], "type": "exact"}], "routes[0].source", "for which data_source"),
        ([{"source": "a"}], "routes[0]", "names its scorer"),
        ([{"source": "a", "type": "exat"}], "routes[0].type", "no reward 'exat'"),
        ([{"source": "a", "type": "exact", "stpo": 1}], "routes[0].stpo", "no such parameter"),
        ([{"source": "a", "type": "exact", "file": 3}], "routes[0].file", "by its path"),
    ],
)
def test_wrong_routes_are_found_by_the_plan(routes, key, reason) -> None:
    (found,) = problems("by_source", None, {"routes": routes})
    assert found.key == f"reward_manager.{key}"
    assert reason in found.reason


def test_only_a_sum_has_components() -> None:
    parts = {"parts": [{"type": "exact"}, {"type": "keyword", "keyword": "x", "name": "said"}]}
    assert component_names("weighted_sum", None, parts) == ("exact", "said")
    assert component_names("weighted_sum", "mine.py", parts) == ()
    assert component_names("weighted_sum", None, {}) == ()
    assert component_names("by_source", None, ROUTES) == ()


@pytest.mark.parametrize("weights", [(1e38, 1e38), (1e300, -1e300), (3e38, 3e38)])
def test_a_sum_beyond_float32_is_no_reward(weights) -> None:
    parts = [{"type": "exact", "name": str(i), "weight": 4 * weight} for i, weight in enumerate(weights)]
    verdict = run_now(bind(resolve("weighted_sum", None, {"parts": parts})).score(Sample("5", "5")))
    assert verdict.outcome is Outcome.FAILED
    assert "beyond float32" in verdict.reason
