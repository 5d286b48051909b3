"""Episodes that environments of the package verifiers play, and their rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tandem.base.environments import ROW, read_rows
from tandem.base.errors import DataError, TandemError
from tandem.reward.outcome import Outcome
from tests.episodes.families import Family
from tests.episodes.test_groups import EpisodePool, Says, made_of, playing, prompt, spec

pytest.importorskip("verifiers")

HERE = Path(__file__).parent
ENV = str(HERE / "sums_env.py")
EXAMPLE = HERE.parents[1] / "examples" / "agents" / "calculator"


@pytest.fixture(scope="module")
def pool() -> Iterator[EpisodePool]:
    """A process with the environment loaded, which takes seconds, for all tests."""
    with EpisodePool(spec("verifiers", parameters={"env": ENV}, sampling={"temperature": 1.0, "top_p": 1.0})) as made:
        yield made


def played(pool: EpisodePool, said: str, fate: str = "well", **options: Any) -> tuple[Any, Any, Any]:
    """One episode of a row with that fate: its verdict, its facts, and what the engine was asked."""
    own = {"answer": "2", "info": {"hint": 12, "fate": fate}, "example_id": 0}
    given = {"n": 1, "max_tokens": 2000, "past": "edited", **options}
    with playing("verifiers", lambda text, seed: said, pool=pool, **given) as (groups, engine, made):
        (group,) = made_of(groups, engine, [prompt(made, "what is 1+1", **{ROW: own})])
    return group.verdicts[0], group.batch.non_tensor_batch["episode"][0], engine.asked


def test_an_environment_asks_and_its_rubric_gives_the_reward(pool: EpisodePool) -> None:
    verdict, facts, _ = played(pool, "the answer is 2")
    assert (verdict.outcome, verdict.reward) == (Outcome.SCORED, 1.0)
    assert verdict.metrics == {"right": 1.0, "num_turns": 2.0}
    assert (facts["turns"], facts["rewritten"], facts["cut"]) == (2, 0, "")
    assert [(m["role"], m["content"]) for m in facts["messages"]][1:3] == [
        ("assistant", "the answer is 2"),
        ("user", "is it 12"),
    ]
    assert played(pool, "the answer is 1")[0].reward == 0.0


def test_where_an_environment_forgets_the_context_begins_anew(pool: EpisodePool) -> None:
    _, facts, asked = played(pool, "the answer is 2", "forgets")
    assert (facts["turns"], facts["rewritten"]) == (2, 1)
    assert asked[0].prompt_ids.tolist() == asked[1].prompt_ids.tolist()


def test_an_empty_answer_is_the_rubrics_to_judge(pool: EpisodePool) -> None:
    verdict, facts, _ = played(pool, "")
    assert (verdict.outcome, verdict.reward, facts["turns"]) == (Outcome.SCORED, 0.0, 2)


@pytest.mark.parametrize("limit", ["turns", "tokens"])
def test_what_a_limit_ends_is_scored_by_the_rubric(pool: EpisodePool, limit: str) -> None:
    verdict, facts, _ = played(pool, "the answer is 2", **{f"max_{limit}": {"turns": 1, "tokens": 9}[limit]})
    assert facts["cut"] == limit
    assert (verdict.outcome, verdict.reward) == (Outcome.SCORED, 1.0)


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ("raises", "the environment ended with an error: InfraError: no server today"),
        ("unscored", "the rubric failed: Error calling reward function right: no reward today"),
        ("colder", "temperature = 0.1: answers are drawn with 1, so leave it out"),
    ],
)
def test_what_goes_wrong_costs_the_episode_and_is_told(pool: EpisodePool, fate: str, reason: str) -> None:
    verdict, _, _ = played(pool, "the answer is 2", fate)
    assert verdict.outcome is Outcome.FAILED and reason in verdict.reason


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"env": "no_such_environment"}, "No module named 'no_such_environment'"),
        ({"env": ENV, "args": {"compared": True}}, "compares the answers of a group"),
    ],
)
def test_an_environment_that_cannot_be_played_ends_the_run_at_its_start(
    parameters: dict[str, Any], reason: str
) -> None:
    with (
        EpisodePool(spec("verifiers", parameters=parameters)) as broken,
        pytest.raises(TandemError, match=reason),
    ):
        broken.await_ready()


def test_the_rows_of_an_environment_are_read_in_another_process() -> None:
    found = read_rows(ENV, {"rows": 2, "held_out": 1})
    assert (len(found["train"]), len(found["eval"])) == (2, 1)
    assert found["train"][1]["prompt"] == [{"role": "user", "content": "what is 1+1"}]
    assert found["train"][1]["answer"] == "2"
    assert found["train"][1][ROW] == {"answer": "2", "info": {"hint": 1, "fate": "well"}, "example_id": 1}
    assert "verifiers.legacy" not in sys.modules  # which takes over the signals of a process
    with pytest.raises(DataError, match="No module named 'nowhere'"):
        read_rows("nowhere", {})


def _ways() -> dict[str, dict[str, Any]]:
    ways = EXAMPLE / "ways"
    return {
        "calculator": {"file": str(ways / "function.py"), "tools": (str(EXAMPLE / "calculator.py"),)},
        "program": {"parameters": {"command": [sys.executable, str(ways / "program.py")]}},
        "verifiers": {"parameters": {"env": str(ways / "environment.py")}},
    }


def _said(text: str, seed: int) -> str:
    """What the model of the example says: it calls the tool or doesn't, as it happens, and repeats what that says."""
    if ">" in text:
        return text.rpartition("\n")[2].rpartition(">")[0] if seed % 4 else "0"
    x, _, y = text.removesuffix("=").partition("+")
    return f"[add(x={x},y={y})]" if seed % 5 else str(int(x) + int(y) - seed % 2)


def test_the_same_episode_written_three_ways_is_the_same() -> None:
    template = yaml.safe_load((EXAMPLE / "sft.yaml").read_text())["model"]["new"]["chat_template"]
    family = Family("pythonic", template, "\n", "")
    found = {}
    for type_, way in _ways().items():
        says: Says = _said
        given = {
            "n": 4,
            "timeout_s": 120.0,
            "max_tokens": 60,
            "past": "edited",
            "max_turns": 3,
            "family": family,
            **way,
        }
        with playing(type_, says, **given) as (groups, engine, made):
            (group,) = made_of(groups, engine, [replace(prompt(made, "123+456="), ground_truth="579")])
        found[type_] = group
    first = found["calculator"]
    rewards = [verdict.reward for verdict in first.verdicts]
    turns = {facts["turns"] for facts in first.batch.non_tensor_batch["episode"]}
    assert {0.0, 1.0} == set(rewards) and turns == {1, 2}
    for type_, group in found.items():
        for name in ("prompts", "responses", "response_mask", "rollout_logprobs"):
            mine, theirs = (each.batch.ragged(name) for each in (first, group))
            assert torch.equal(mine.values, theirs.values) and torch.equal(mine.offsets, theirs.offsets), (type_, name)
        assert [verdict.reward for verdict in group.verdicts] == rewards, type_
        assert [facts["rewritten"] for facts in group.batch.non_tensor_batch["episode"]] == [0] * 4, type_
