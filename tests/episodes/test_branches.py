"""Conversations side by side within one episode: equal whatever is done first, each trained behind what it saw."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.base.seeding import derive_seed
from tandem.columns.ragged import Ragged
from tandem.episodes.process.pool import EpisodePool
from tandem.models.layouts.packing import pack_samples
from tandem.reward.outcome import Outcome
from tandem.rollout.protocol import GroupOutput, GroupRequest, Sampling
from tests.episodes.test_groups import PLAYS, Says, ScriptedEngine, made_of, playing, prompt, spec

COLUMNS = ("prompts", "responses", "response_mask", "rollout_logprobs", "restarts")


class Unordered(ScriptedEngine):
    """Answers what it is asked in an order of its own: that of ``dice``."""

    def __init__(self, made: Any, says: Says, dice: random.Random) -> None:
        super().__init__(made, says)
        self._dice = dice

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        held: list[GroupRequest] = []
        for request in requests:
            if request is not None:
                held.append(request)
            elif held:
                yield self._answer(held.pop(self._dice.randrange(len(held))), sampling)
        while held:
            yield self._answer(held.pop(self._dice.randrange(len(held))), sampling)


def says(text: str, seed: int) -> str:
    return ("is", "the answer is 12", "17 is it")[seed % 3]


def pool(branches: int = 3, **changed: Any) -> EpisodePool:
    return EpisodePool(spec("branching", file=PLAYS, branches=branches, **changed))


def group_of(processes: EpisodePool, order: int, *, branches: int = 3, rewards: bool = False, **options: Any) -> Any:
    """The group of two episodes whose turns are answered in the given order, and what the engine was asked."""
    given_ = {"n": 2, "pool": processes, "branches": branches, "turn_rewards": rewards, **options}
    with playing("branching", says, **given_) as (groups, _, made):
        engine = Unordered(made, says, random.Random(order))
        (group,) = made_of(groups, engine, [prompt(made, "hello", rewards=rewards)])
    return group, engine


@pytest.fixture(scope="module")
def exact() -> Iterator[EpisodePool]:
    """Processes of a run that can be repeated bit by bit."""
    with pool(exact=True, turn_rewards=True) as found:
        yield found


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.integers(0, 2**32), limits=st.sampled_from([{}, {"max_turns": 1}, {"max_tokens": 120}]))
def test_what_is_done_first_changes_nothing(exact: EpisodePool, order: int, limits: dict[str, int]) -> None:
    (mine, _), (theirs, _) = (group_of(exact, number, rewards=True, **limits) for number in (0, order))
    for name in (*COLUMNS, "token_rewards"):
        one, other = mine.batch.ragged(name), theirs.batch.ragged(name)
        assert torch.equal(one.values, other.values) and torch.equal(one.offsets, other.offsets), name
    assert mine.batch.dense("truncated").tolist() == theirs.batch.dense("truncated").tolist()
    assert mine.verdicts == theirs.verdicts
    kept = ("turns", "sampled", "cut", "rewritten", "branches", "messages", "turn_rewards")
    for one, other in zip(*(made.batch.non_tensor_batch["episode"] for made in (mine, theirs)), strict=True):
        assert [one[name] for name in kept] == [other[name] for name in kept]


def test_a_turn_is_drawn_by_the_numbers_of_its_branch_and_of_its_place_in_it(exact: EpisodePool) -> None:
    _, engine = group_of(exact, 5)
    expected = [
        derive_seed(7, "test", "p-hello", index, *(("branch", branch) if branch else ()), *later)
        for index in (0, 1)
        for branch in (0, 1, 2)
        for later in (("turn", 0) if branch else (), ("turn", 1))
    ]
    assert sorted(request.seeds[0] for request in engine.asked) == sorted(expected)


def test_every_branch_stands_in_the_one_sample_behind_what_it_saw(exact: EpisodePool) -> None:
    """The documents of the packed row are the contexts that the engine was asked with, and their answers."""
    group, engine = group_of(exact, 3, rewards=True)
    batch = group.batch
    columns = {name: batch.ragged(name) for name in ("prompts", "responses", "response_mask", "restarts")}
    packed = pack_samples(**columns, layout=lambda documents, device: documents)  # type: ignore[arg-type, return-value]
    documents: Any = packed.layout
    row = packed.input_ids.tolist()
    shown = {
        tuple(row[at : at + prefix] + row[start : start + length])
        for at, prefix, start, length in zip(
            *(x.tolist() for x in (documents.prefix_start, documents.prefix_length, documents.start, documents.length)),
            strict=True,
        )
    }
    asked = [tuple(request.prompt_ids.tolist()) for request in engine.asked]
    for context in asked:
        assert any(document[: len(context)] == context for document in shown), context
    assert len(shown) == 3 * 2
    facts = batch.non_tensor_batch["episode"]
    assert [(one["branches"], one["turns"]) for one in facts] == [(3, 6)] * 2
    assert [one["turn_rewards"] for one in facts] == [[0.0, 1.0, 10.0, 11.0, 20.0, 21.0]] * 2
    assert int(batch.ragged("response_mask").values.sum()) == sum(one["sampled"] for one in facts)
    assert [verdict.reward for verdict in group.verdicts] == [float(one["sampled"]) for one in facts]
    assert int(batch.ragged("restarts").values.sum()) == 2 * 2
    assert {message.get("branch", 0) for message in facts[0]["messages"]} == {0, 1, 2}


def test_a_branch_has_its_share_of_the_tokens_and_no_more(exact: EpisodePool) -> None:
    group, _ = group_of(exact, 1, max_tokens=120)
    responses, restarts = group.batch.ragged("responses"), group.batch.ragged("restarts")
    assert int(responses.lengths.max()) <= 120
    for row in range(2):
        places = [0, *restarts.row(row).nonzero()[:, 0].tolist(), len(restarts.row(row))]
        assert all(end - begin <= 40 for begin, end in itertools.pairwise(places))


def test_without_numbers_an_exact_run_refuses_what_is_asked_at_once() -> None:
    with pool(exact=True, parameters={"numbered": False}) as processes:
        group, _ = group_of(processes, 0)
    (verdict, _) = group.verdicts
    assert verdict.outcome is Outcome.FAILED and "chat(..., branch=1)" in verdict.reason


def test_without_numbers_branches_are_counted_in_the_order_of_the_calls() -> None:
    with pool(parameters={"numbered": False}) as processes:
        group, _engine = group_of(processes, 4)
    with pool() as processes:
        numbered, _ = group_of(processes, 9)
    for name in COLUMNS:
        assert torch.equal(group.batch.ragged(name).values, numbered.batch.ragged(name).values), name
    assert [one["branches"] for one in group.batch.non_tensor_batch["episode"]] == [3, 3]


def test_a_branch_that_is_not_there_is_told(exact: EpisodePool) -> None:
    group, _ = group_of(exact, 0, branches=2)
    (verdict, _) = group.verdicts
    assert verdict.outcome is Outcome.FAILED and "no branch 2: rollout.episode.branches is 2" in verdict.reason


PROGRAM = """
import asyncio, json, sys
from openai import AsyncOpenAI

task = json.load(sys.stdin)


async def one(client, number):
    messages, said = [{"role": "user", "content": task["messages"][-1]["content"] + str(number)}], 0
    for turn in range(2):
        headers = {"X-Tandem-Branch": str(number)}
        extra = {"return_token_ids": True}
        answer = await client.chat.completions.create(
            model="policy", messages=messages, extra_headers=headers, extra_body=extra
        )
        said += len(answer.choices[0].token_ids)
        messages += [answer.choices[0].message, {"role": "user", "content": str(turn)}]
    return said


async def main():
    async with AsyncOpenAI(max_retries=0) as client:
        print(float(sum(await asyncio.gather(*(one(client, number) for number in range(3))))))


asyncio.run(main())
"""


def test_a_program_names_the_branch_in_a_header_and_is_the_same_as_a_function(
    exact: EpisodePool, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    function, _ = group_of(exact, 2)
    parameters = {"command": [sys.executable, str(tmp_path / "agent.py")]}
    with EpisodePool(spec("program", branches=3, exact=True, parameters=parameters)) as processes:
        program, _ = group_of(processes, 8, past="edited")
    assert [verdict.reward for verdict in program.verdicts] == [verdict.reward for verdict in function.verdicts]
    for name in COLUMNS:
        assert torch.equal(program.batch.ragged(name).values, function.batch.ragged(name).values), name


@given(
    parts=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4),
    data=st.randoms(use_true_random=False),
)
def test_a_branch_is_packed_as_it_would_be_alone(parts: list[list[int]], data: random.Random) -> None:
    """Inputs, positions and targets of the joined sample's trained tokens are those of a sample of each branch."""
    from tandem.episodes.trajectory import Trajectory

    def path(turns: list[int]) -> Trajectory:
        made = Trajectory([data.randrange(9) for _ in range(data.randint(1, 3))])
        for turn, count in enumerate(turns):
            if turn:
                made.insert([data.randrange(9)])
            made.ids += (ids := [data.randrange(9) for _ in range(count)])
            made.restarts += [False] * len(ids)
            made.mask += [True] * len(ids)
            made.logprobs += [0.0] * len(ids)
            made.versions += [0] * len(ids)
            made.turns.append(count)
        return made

    def seen(paths: list[Trajectory]) -> list[tuple[list[int], int]]:
        """What stands in the document before each trained token, and the token."""
        rows = [one.columns(restarts=True) for one in paths]
        given_ = {name: Ragged.from_rows([row[name] for row in rows]) for name in rows[0]}
        prompts = Ragged.from_rows([torch.tensor(one.prompt) for one in paths])
        keep = {name: given_[name] for name in ("responses", "response_mask", "restarts")}
        packed = pack_samples(prompts, **keep, layout=lambda documents, device: documents)  # type: ignore[arg-type, return-value]
        documents: Any = packed.layout
        found = []
        for place, target in zip(packed.read.tolist(), packed.targets.tolist(), strict=True):
            for i in range(len(documents.start)):
                start, length = int(documents.start[i]), int(documents.length[i])
                at, prefix = int(documents.prefix_start[i]), int(documents.prefix_length[i])
                if start <= place < start + length:
                    before = list(range(at, at + prefix)) + list(range(start, place + 1))
                    break
            else:
                before = list(range(place - int(packed.positions[place]), place + 1))
            assert [int(packed.positions[one]) for one in before] == [*range(len(before))]
            found.append(([int(packed.input_ids[one]) for one in before], target))
        return found

    paths = [path(turns) for turns in parts]
    alone = [one for single in paths for one in seen([single])]
    assert seen([Trajectory.joined(paths)]) == alone
