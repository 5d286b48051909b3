"""Episodes that are outside programs: their rewards, their faults, and what becomes of answers that they change."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.reward.outcome import Outcome
from tests.episodes.test_groups import Says, ScriptedEngine, made_of, playing, prompt

AGENT = str(Path(__file__).parent / "agent.py")
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1, "y": 2}}</tool_call>'


def played(how: str, said: str | Says = "is it 12", **options: Any) -> tuple[Any, ScriptedEngine, Any]:
    """The group of one episode of the program."""
    says: Says = said if callable(said) else lambda text, seed: said
    parameters = {"command": [sys.executable, AGENT, how], **options.pop("parameters", {})}
    given = {"n": 1, "max_tokens": 2000, "past": "edited", "parameters": parameters, **options}
    with playing("program", says, **given) as (groups, engine, made):
        (group,) = made_of(groups, engine, [prompt(made, "hello")])
    return group, engine, made


def contexts(engine: ScriptedEngine, made: Any) -> list[str]:
    return [made.decode(request.prompt_ids.tolist()) for request in engine.asked]


@pytest.mark.parametrize(("how", "said"), [("keeps", "is it 12"), ("reorders", CALL)])
def test_what_a_program_hands_back_is_found_in_the_record(how: str, said: str) -> None:
    group, engine, _ = played(how, said)
    (facts,) = group.batch.non_tensor_batch["episode"]
    assert (facts["turns"], facts["rewritten"], facts["cut"]) == (2, 0, "")
    first, second = engine.asked
    ids, mask = (group.batch[0].batch[name].tolist() for name in ("responses", "response_mask"))
    assert second.prompt_ids.tolist()[: len(first.prompt_ids)] == first.prompt_ids.tolist()
    assert (first.prompt_ids.tolist() + ids)[: len(second.prompt_ids)] == second.prompt_ids.tolist()
    assert mask.count(True) == facts["sampled"] and not bool(group.batch.ragged("restarts").values.any())
    (verdict,) = group.verdicts
    assert (verdict.outcome, verdict.reward) == (Outcome.SCORED, 16.0 if how == "keeps" else 2.0)
    assert verdict.metrics == {"turns_seen": 2.0, "parts": 0.0}


def test_a_program_reads_an_answer_while_it_is_drawn() -> None:
    group, _, _ = played("streams")
    (facts,) = group.batch.non_tensor_batch["episode"]
    assert (facts["turns"], facts["rewritten"]) == (2, 0)  # put together, it is what was sampled
    (verdict,) = group.verdicts
    assert verdict.reward == 16.0 and verdict.metrics["parts"] == 2 * 6  # tokens


def test_rewards_of_turns_come_with_a_programs_answer(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import sys\nsys.argv[1] = 'keeps'\nfrom tests.episodes import agent\n"
        'print(\'{"score": 1, "turn_rewards": [0.25, 0.5]}\')\n'
    )
    command = [sys.executable, str(tmp_path / "agent.py"), ""]
    group, _, _ = played("", turn_rewards=True, parameters={"command": command})
    assert group.batch.non_tensor_batch["episode"][0]["turn_rewards"] == [0.25, 0.5]
    rewards = group.batch.ragged("token_rewards").values
    assert sorted(rewards[rewards != 0].tolist()) == [0.25, 0.5]


@pytest.mark.parametrize(("how", "said"), [("trims", " is it 12 \n"), ("drops_reasoning", "<think>x</think>12")])
def test_where_a_program_changed_an_answer_the_context_begins_anew(how: str, said: str) -> None:
    group, engine, made = played(how, said)
    (facts,) = group.batch.non_tensor_batch["episode"]
    assert (facts["turns"], facts["rewritten"]) == (2, 1)
    row = group.batch[0].batch
    ids, mask, restarts = (row[name].tolist() for name in ("responses", "response_mask", "restarts"))
    place = restarts.index(True)
    second = engine.asked[1].prompt_ids.tolist()
    assert ids[place : place + len(second)] == second  # what the model saw: the client's words
    assert not any(mask[place : place + len(second)])  # and none of them counts as sampled
    assert mask[:place] == [True] * place and all(mask[place + len(second) :])
    assert said.strip() not in contexts(engine, made)[1] or how == "trims"


def test_a_program_and_a_function_that_do_the_same_are_the_same() -> None:
    says: Says = lambda text, seed: "is it 12" if seed % 3 else "the answer"  # noqa: E731
    program, _, _ = played("keeps", says, n=4)
    options = {"n": 4, "file": str(Path(__file__).with_name("plays.py")), "max_tokens": 2000}
    with playing("counted", says, **options) as (groups, engine, made):
        (function,) = made_of(groups, engine, [prompt(made, "hello")])
    for name in ("responses", "response_mask", "rollout_logprobs"):
        mine, theirs = (group.batch.ragged(name) for group in (program, function))
        assert torch.equal(mine.values, theirs.values) and torch.equal(mine.offsets, theirs.offsets), name
    assert [one.reward for one in program.verdicts] == [one.reward for one in function.verdicts]


def test_a_limit_is_told_to_the_program_and_its_reward_is_lost_with_it() -> None:
    group, _, _ = played("endless", max_turns=3)
    (facts,), (verdict,) = group.batch.non_tensor_batch["episode"], group.verdicts
    assert (facts["turns"], facts["cut"]) == (3, "turns")
    assert verdict.outcome is Outcome.FAILED and "limit of turns" in verdict.reason


@pytest.mark.parametrize(
    ("how", "reason"), [("fails", "status 1: out of patience"), ("babbles", "is no reward: 'very good'")]
)
def test_a_program_that_goes_wrong_costs_its_episode(how: str, reason: str) -> None:
    (verdict,) = played(how)[0].verdicts
    assert verdict.outcome is Outcome.FAILED and reason in verdict.reason


def test_a_program_that_hangs_is_ended_with_its_episode(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = {"command": [sys.executable, AGENT, "hangs", str(pid)]}
    (verdict,) = played("hangs", parameters=command, timeout_s=3.0)[0].verdicts
    assert verdict.outcome is Outcome.TIMED_OUT
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_the_reward_manager_scores_a_program_that_leaves_it_to_it() -> None:
    group, _, _ = played("keeps", parameters={"reward": "manager"})
    assert group.verdicts == (None,) and group.batch.non_tensor_batch["answer_text"] == ["is it 12"]
