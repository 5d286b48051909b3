"""What a judge costs is bounded: by what replies say of themselves, over processes, and over runs that go on."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.base.deadline import Deadline
from tandem.base.errors import RewardError
from tandem.reward.outcome import Outcome, Sample
from tandem.reward.process.pool import ScoringPool
from tandem.reward.resolve import resolve
from tandem.reward.scorers.judge import Judge, check_judge
from tests.reward.test_judge import Reply, Service, ask, graded, quick, service

__all__ = ["quick", "service"]


def paid(text: str, tokens: tuple[int, int] | None) -> Reply:
    status, headers, body = graded(text)
    reply = json.loads(body)
    if tokens is not None:
        reply["usage"] = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    return status, headers, json.dumps(reply).encode()


def frugal(service: Service, file: Path, budget: float = 1.0, **others: Any) -> Judge:
    """At a price of 1 per token, so that costs are counts; a question has at most 200 + 100."""
    money = {"budget": budget, "input_price": 1e6, "output_price": 1e6, "spent_in": str(file)}
    return Judge(base_url=service.url, model="m", template="{response}".ljust(200), max_tokens=100, **money, **others)


def test_a_budget_counts_what_replies_say_and_ends_before_it_is_exceeded(service: Service, tmp_path: Path) -> None:
    service.answer = lambda number, content: paid("Grade: 5", (50, 10))
    judge = frugal(service, tmp_path / "spent.txt", budget=500.0)
    costs = []
    with pytest.raises(RewardError, match=r"the budget of 500 is spent \(2"):
        while True:
            costs.append(ask(judge)["cost"])
    assert costs == [60.0] * len(service.bodies) and 3 <= len(costs) <= 4  # then a question of 290 fits no more
    again = frugal(service, tmp_path / "spent.txt", budget=500.0)  # a run that goes on
    with pytest.raises(RewardError, match="is spent"):
        ask(again)
    assert ask(frugal(service, tmp_path / "spent.txt", budget=1000.0))["cost"] == 60.0
    assert float((tmp_path / "spent.txt").read_text()) == 60.0 * len(service.bodies)


@pytest.mark.parametrize(
    ("reply", "kept"),
    [
        (lambda: paid("Grade: 5", None), True),
        (lambda: paid("Grade: 5", (-1, 5)), True),
        (lambda: paid("no number", (50, 10)), 60.0),
        (lambda: (400, {}, b"no"), False),
        (lambda: (503, {}, b"later"), False),
    ],
)
def test_what_is_refused_costs_nothing_and_what_is_not_counted_costs_the_most(
    service: Service, tmp_path: Path, reply: Callable[[], Reply], kept: bool | float
) -> None:
    service.answer = lambda number, content: reply()
    with contextlib.suppress(RewardError):
        ask(frugal(service, tmp_path / "spent.txt", budget=1e6, attempts=1))
    most = len(service.bodies[0]["messages"][0]["content"]) + 100
    assert float((tmp_path / "spent.txt").read_text()) == {True: most, False: 0.0}.get(kept, kept)


def test_questions_of_several_processes_at_once_stay_within_the_budget(service: Service, tmp_path: Path) -> None:
    def slowly(number: int, content: str) -> Reply:
        time.sleep(0.05)
        return paid("Grade: 5", (150, 100))

    service.answer = slowly
    parameters = {
        "base_url": service.url,
        "model": "m",
        "template": "{response}".ljust(200),
        "max_tokens": 100,
        "budget": 2000.0,
        "input_price": 1e6,
        "output_price": 1e6,
        "spent_in": str(tmp_path / "spent.txt"),
    }
    samples = [Sample(response=str(place), prompt="p", ground_truth="") for place in range(24)]
    with ScoringPool(resolve("judge", parameters=parameters), workers=2, deadline_s=20.0) as pool:
        scores = pool.collect(pool.submit(samples), Deadline(60.0))
    answered = scores.outcomes.count(Outcome.SCORED)
    assert 5 <= answered == len(service.bodies) <= 8  # at 250 each; a question takes 300 before it is sent
    said = [reason for reason in scores.reasons if reason]
    assert len(said) == 24 - answered and all("the budget of 2000 is spent" in reason for reason in said)


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"budget": 5.0, "input_price": 1.0, "output_price": 1.0}, "spent_in"),
        ({"budget": 5.0, "spent_in": "x.txt", "output_price": 1.0}, "input_price"),
        ({"input_price": 1.0}, "input_price"),
        ({"budget": 5.0, "spent_in": "x.txt", "input_price": 0.0, "output_price": 0.0}, "budget"),
        ({"budget": 5.0, "spent_in": ".", "input_price": 0.0, "output_price": 1.0}, "spent_in"),
    ],
)
def test_half_a_budget_is_refused_before_the_run(wrong: dict[str, Any], key: str) -> None:
    defaults: dict[str, Any] = dict.fromkeys(
        ("template", "api_key_env", "budget", "input_price", "output_price", "spent_in")
    )
    given = {"base_url": "http://localhost/v1", "grade": "(x)", "lowest": 0.0, "highest": 1.0, "attempts": 1}
    assert [found.parameter for found in check_judge({**defaults, **given, **wrong})] == [key]
    with pytest.raises(RewardError, match=key):
        Judge(base_url="http://localhost/v1", model="m", **wrong)


def test_a_file_that_counts_something_else_is_left_as_it_is(service: Service, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("my notes")
    with pytest.raises(RewardError, match="holds 'my notes', not what was spent: name another file"):
        ask(frugal(service, tmp_path / "notes.txt"))
    assert (tmp_path / "notes.txt").read_text() == "my notes" and service.bodies == []
