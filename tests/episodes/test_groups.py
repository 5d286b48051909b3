"""Groups of episodes with an engine that says what a test wants: tokens, masks, limits, faults, tools."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.base.errors import TandemError
from tandem.base.seeding import derive_seed
from tandem.data.chat import encode_chat_prompt
from tandem.data.prompts import Prompt
from tandem.episodes.past import Past
from tandem.episodes.process.pool import EpisodePool
from tandem.episodes.process.spec import EpisodeSpec
from tandem.episodes.tools import load_tools
from tandem.models.tokenizer import encode_text
from tandem.reward.outcome import Outcome
from tandem.roles.rollout.episodes import EpisodeGroups
from tandem.roles.rollout.making import Beginning, Made, make_groups
from tandem.roles.rollout.talk import EpisodeRules
from tandem.rollout.protocol import GroupOutput, GroupRequest, SampleOutput, Sampling
from tests.episodes.families import FAMILIES, Family, tokenizer

HERE = Path(__file__).parent
PLAYS = str(HERE / "plays.py")
TOOLS = str(HERE / "slow_tools.py")
DEFINITIONS = [tool.definition for tool in load_tools(TOOLS).values()]
HERMES = FAMILIES[0]

STRIPPING = replace(
    HERMES, template=HERMES.template.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
)
"""A family whose template drops what an earlier turn has reasoned."""

Says = Callable[[str, int], str]
"""(text of the prompt, seed) -> the turn, without its end token."""


class ScriptedEngine:
    """Answers what ``says`` gives for a prompt. ``asked`` are all requests; versions count them."""

    def __init__(self, made: Any, says: Says) -> None:
        self.asked: list[GroupRequest] = []
        self._tokenizer, self._says = made, says

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        held: list[GroupRequest] = []
        source = iter(requests)
        while True:
            request = next(source, "end")
            if request == "end":
                break
            if isinstance(request, GroupRequest):
                held.append(request)
            elif held:
                yield self._answer(held.pop(0), sampling)
        for request in held:
            yield self._answer(request, sampling)

    def _answer(self, request: GroupRequest, sampling: Sampling) -> GroupOutput:
        self.asked.append(request)
        text = self._tokenizer.decode(request.prompt_ids.tolist())
        ids = [*encode_text(self._tokenizer, self._says(text, request.seeds[0])), self._tokenizer.eos_token_id]
        limit = request.limit(sampling)
        ended = len(ids) <= limit
        ids = torch.tensor(ids[:limit])  # type: ignore[assignment]
        logprobs = -torch.rand(len(ids), generator=torch.Generator().manual_seed(request.seeds[0] % 2**32))
        versions = torch.full((len(ids),), len(self.asked), dtype=torch.int32)
        if request.watch is not None:
            for token, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True):
                request.watch(0, [token], [logprob])
        return GroupOutput(request, (SampleOutput(ids, logprobs, versions, "stop" if ended else "length"),))  # type: ignore[arg-type]


def spec(type_: str, *, file: str | None = None, **changed: Any) -> EpisodeSpec:
    usual: dict[str, Any] = {"timeout_s": 30.0, "workers": 1, "concurrency": 16, "start_s": 60.0, "tools": ()}
    return EpisodeSpec(**{"type": type_, "file": file, "parameters": {}, **usual, **changed})


@contextmanager
def playing(
    type_: str,
    says: Says,
    *,
    family: Family = HERMES,
    n: int = 2,
    max_tokens: int = 400,
    max_turns: int = 8,
    tools: bool | tuple[str, ...] = False,
    past: Past = "fixed",
    turn_rewards: bool = False,
    pool: EpisodePool | None = None,
    offered: Any = DEFINITIONS,
    max_sampled: int | None = None,
    branches: int = 1,
    **options: Any,
) -> Iterator[tuple[EpisodeGroups, ScriptedEngine, Any]]:
    made = tokenizer(family)
    options = {"tools": (TOOLS,) if tools is True else tools or (), "turn_rewards": turn_rewards, **options}
    rules = EpisodeRules(max_turns, 5000, offered if tools else None, family.name, past, turn_rewards)
    rules = replace(rules, max_sampled=max_sampled, branches=branches)
    sampling = Sampling(n=n, max_tokens=max_tokens, stop_token_ids=(made.eos_token_id,))
    with EpisodePool(spec(type_, **options)) if pool is None else nullcontext(pool) as pool:
        yield EpisodeGroups(pool, rules, sampling, made), ScriptedEngine(made, says), made


def prompt(made: Any, text: str, *, tools: bool = False, **info: Any) -> Prompt:
    messages = [{"role": "user", "content": text}]
    rendered, ids = encode_chat_prompt(made, messages, tools=DEFINITIONS if tools else None)
    return Prompt(f"p-{text}", tuple(ids), rendered, messages=tuple(messages), extra_info=info)


def made_of(groups: EpisodeGroups, engine: Any, prompts: list[Prompt]) -> list[Made]:
    """The groups of the prompts, in their order."""
    left = iter(enumerate(prompts))

    def begin() -> bool:
        number, found = next(left, (-1, None))
        if found is not None:
            groups.begin(Beginning(str(number), found, number, (7, "test")))
        return found is not None

    found = {made.key: made for made in make_groups(engine, groups, begin)}
    return [found[str(number)] for number in range(len(prompts))]


def adds(family: Family) -> Says:
    """Calls the tool first, then says its result."""

    def says(text: str, seed: int) -> str:
        return "the answer is 2" if text.count("assistant") > 1 or "RESULTS" in text else family.call

    return says


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_tool_is_called_and_its_result_stands_in_the_next_prompt(family: Family) -> None:
    with playing("tool_calls", adds(family), family=family, tools=True) as (groups, engine, made):
        (group,) = made_of(groups, engine, [prompt(made, "what is 1+1", tools=True)])
    first, second = (r for r in engine.asked if r.seeds[0] in _seeds("p-what is 1+1", 0))
    turn = [*encode_text(made, family.call), made.eos_token_id]
    ids = second.prompt_ids.tolist()
    assert ids[: len(first.prompt_ids) + len(turn)] == first.prompt_ids.tolist() + turn
    batch = group.batch
    assert batch.non_tensor_batch["answer_text"] == ["the answer is 2"] * 2
    facts = batch.non_tensor_batch["episode"][0]
    assert (facts["turns"], facts["tool_calls"], facts["tool_errors"], facts["unparsed"]) == (2, 1.0, 0.0, 0.0)
    assert [m["role"] for m in facts["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert facts["messages"][2]["content"] == "2"
    _check_columns(batch, engine, made)


def _seeds(uid: str, index: int) -> list[int]:
    origin = (7, "test", uid, index)
    return [derive_seed(*origin), derive_seed(*origin, "turn", 1), derive_seed(*origin, "turn", 2)]


def _check_columns(batch: Any, engine: ScriptedEngine, made: Any) -> None:
    """Sampled tokens, and they alone, are masked in, with the log-probs and versions that the engine gave."""
    for row in range(len(batch)):
        item = batch[row].batch
        ids, mask = item["responses"].tolist(), item["response_mask"].tolist()
        prompt_length, place = len(item["prompts"]), 0
        seeds = _seeds(batch.non_tensor_batch["uid"][row], row)
        for request in [r for seed in seeds for r in engine.asked if r.seeds[0] == seed]:
            start = len(request.prompt_ids) - prompt_length
            assert not any(mask[place:start])
            assert item["rollout_logprobs"][place:start].tolist() == [0.0] * (start - place)
            assert (item["prompts"].tolist() + ids)[: len(request.prompt_ids)] == request.prompt_ids.tolist()
            place = start + mask[start:].index(False) if False in mask[start:] else len(mask)
            versions = set(item["token_versions"][start:place].tolist())
            assert versions == {engine.asked.index(request) + 1}
        assert place == len(mask)


def test_episodes_of_tokens_and_of_messages() -> None:
    for type_ in ("talk", "tokens"):
        with playing(type_, lambda text, seed: "is", file=PLAYS, parameters={"turns": 3}) as found:
            groups, engine, made = found
            (group,) = made_of(groups, engine, [prompt(made, "hello")])
        assert [v.outcome for v in group.verdicts if v is not None] == [Outcome.SCORED] * 2
        assert [one["turns"] for one in group.batch.non_tensor_batch["episode"]] == [3, 3]
        _check_columns(group.batch, engine, made)


def test_limits_cut_and_say_which() -> None:
    says: Says = lambda text, seed: "the answer"  # noqa: E731
    with playing("talk", says, file=PLAYS, parameters={"turns": 9}, max_turns=3) as (groups, e, made):
        (group,) = made_of(groups, e, [prompt(made, "hello")])
    facts = group.batch.non_tensor_batch["episode"][0]
    assert (facts["turns"], facts["cut"]) == (3, "turns")
    assert group.batch.dense("truncated").tolist() == [True, True]
    with playing("talk", says, file=PLAYS, parameters={"turns": 9}, max_tokens=70) as (
        groups,
        e,
        made,
    ):
        (group,) = made_of(groups, e, [prompt(made, "hello")])
    facts, lengths = group.batch.non_tensor_batch["episode"][0], group.batch.ragged("responses").lengths
    assert facts["cut"] == "tokens"
    assert int(lengths.max()) <= 70
    assert bool(group.batch.ragged("response_mask").row(0)[-1])  # what no turn answered is left out


def test_a_limit_may_count_what_was_sampled_alone() -> None:
    options = {"file": PLAYS, "parameters": {"turns": 9}, "n": 1}
    with playing("talk", lambda text, seed: "the answer", max_sampled=7, **options) as (groups, engine, made):
        (group,) = made_of(groups, engine, [prompt(made, "hello")])
    (facts,) = group.batch.non_tensor_batch["episode"]
    mask = group.batch.ragged("response_mask").values
    assert (facts["turns"], facts["cut"], facts["sampled"], int(mask.sum())) == (2, "tokens", 7, 7)  # of 4 tokens each
    assert len(mask) > 7


def test_a_cut_episode_is_graded_on_its_own_scale_or_not_at_all() -> None:
    def verdicts(type_: str, **parameters: Any) -> Any:
        options = {"file": PLAYS, "parameters": {"turns": 9, **parameters}}
        with playing(type_, lambda text, seed: "is", max_turns=2, n=1, **options) as (groups, engine, made):
            (group,) = made_of(groups, engine, [prompt(made, "hello")])
        return group.verdicts[0]

    lost = verdicts("talk", on_the_way=False)
    assert lost.outcome is Outcome.FAILED and "limit of turns" in lost.reason and "policy.reward" in lost.reason
    kept = verdicts("talk")
    assert (kept.outcome, kept.reward) == (Outcome.SCORED, 2.0)
    assert verdicts("chatter") is None  # it leaves the reward to the reward manager


@pytest.mark.parametrize("how", ["call", "list"])
def test_the_reward_of_a_turn_stands_on_its_last_sampled_token(how: str) -> None:
    says: Says = lambda text, seed: "is" if seed % 2 else "the answer"  # noqa: E731
    options = {"file": PLAYS, "parameters": {"turns": 4, "how": how}, "max_turns": 3 if how == "call" else 4}
    with playing("stepwise", says, n=3, turn_rewards=True, **options) as (groups, engine, made):
        (group,) = made_of(groups, engine, [prompt(made, "hello")])
    outcomes = [(v.outcome, v.reward) for v in group.verdicts if v is not None]
    assert outcomes == [(Outcome.SCORED, 0.0 if how == "call" else 1.0)] * 3  # a limit ended what is worth nothing more
    for row, facts in enumerate(group.batch.non_tensor_batch["episode"]):
        item = group.batch[row].batch
        ends = [*item["response_mask"].tolist(), False]
        expected, length = [], 0
        for sampled, following in pairwise(ends):
            length += sampled
            expected.append(float(length) if sampled and not following else 0.0)
            length *= following
        assert item["token_rewards"].tolist() == expected
        assert facts["turn_rewards"] == [reward for reward in expected if reward]
        assert len(facts["turn_rewards"]) == facts["turns"] == options["max_turns"]


@pytest.mark.parametrize(
    ("how", "reason"),
    [("short", "one for each of 3 turns, not 2"), ("fails", "not a number"), ("call", "turn_rewards: true")],
)
def test_turn_rewards_that_are_none_cost_the_episode(how: str, reason: str) -> None:
    options = {"file": PLAYS, "parameters": {"how": how}, "turn_rewards": how != "call"}
    with playing("stepwise", lambda text, seed: "is", n=1, **options) as (groups, engine, made):
        (group,) = made_of(groups, engine, [prompt(made, "hello")])
    (verdict,) = group.verdicts
    assert verdict is not None and verdict.outcome is Outcome.FAILED and reason in verdict.reason
    if how != "call":
        assert not bool(group.batch.ragged("token_rewards").values.any())


def test_a_template_that_strips_reasoning_is_followed_where_the_config_says_so() -> None:
    def run(past: Past) -> tuple[Any, list[str], Any]:
        options = {
            "file": PLAYS,
            "parameters": {"turns": 3},
            "n": 1,
            "past": past,
            "family": STRIPPING,
        }
        with playing("talk", lambda text, seed: "<think>is</think>the answer", **options) as (groups, engine, made):
            (group,) = made_of(groups, engine, [prompt(made, "hello")])
        asked = [made.decode(request.prompt_ids.tolist()) for request in engine.asked]
        return group.batch, asked, group.batch.non_tensor_batch["episode"][0]

    kept, asked, facts = run("fixed")
    assert facts["rewritten"] == 0 and asked[1].count("<think>") == 1 and asked[2].count("<think>") == 2
    assert "restarts" not in kept.columns
    split, asked, facts = run("template")
    assert (facts["turns"], facts["rewritten"]) == (3, 2) and not any("<think>" in text for text in asked)
    restarts, mask = split.ragged("restarts").values, split.ragged("response_mask").values
    assert int(restarts.sum()) == 2 and not bool((restarts & mask).any())
    assert int(mask.sum()) == facts["sampled"] == int(kept.ragged("response_mask").values.sum())


FATES = {
    "raises": (Outcome.FAILED, "the wheel came off"),
    "exits": (Outcome.FAILED, "SystemExit"),
    "hangs": (Outcome.TIMED_OUT, "outside of the policy"),
    "refuses": (Outcome.TIMED_OUT, "outside of the policy"),
    "blocks": (Outcome.TIMED_OUT, "outside of the policy"),
    "dies": (Outcome.FAILED, "SIGKILL"),
    "nonsense": (Outcome.FAILED, "not a number"),
    "rewrites": (Outcome.FAILED, "message 1 is not what it was"),
    "parallel": (Outcome.FAILED, "one thing at a time"),
}


def test_a_fault_costs_its_episodes_and_no_others() -> None:
    fates = [*FATES, "well", "silent", *["well"] * 5]
    options = {"file": PLAYS, "timeout_s": 1.0, "workers": 2}
    with playing("faulty", lambda text, seed: "is", n=1, **options) as (groups, engine, made):
        prompts = [prompt(made, f"{number} {fate}", fate=fate) for number, fate in enumerate(fates)]
        found = made_of(groups, engine, prompts)
    for fate, group in zip(fates, found, strict=True):
        (verdict,) = group.verdicts
        if fate == "silent":
            assert verdict is None
            continue
        assert verdict is not None
        outcome, reason = FATES.get(fate, (Outcome.SCORED, ""))
        assert (verdict.outcome, reason in verdict.reason) == (outcome, True), (fate, verdict)
        if outcome is Outcome.SCORED:
            assert group.batch.ragged("response_mask").lengths.tolist() == [2]


def test_what_a_tool_does_wrong_is_told_to_the_model() -> None:
    said = [
        '<tool_call>{"name": "broken", "arguments": {"x": 1}}</tool_call>',
        '<tool_call>{"name": "absent", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"x": "one"}}</tool_call>',
        '<tool_call>{"name": "stuck", "arguments": {"x": 1}}</tool_call>',
        '<tool_call>{"name": "later", "arguments": {"x": 12}}</tool_call>',
        "<tool_call>{</tool_call>",
        "the answer",
    ]
    says: Says = lambda text, seed: said[text.count("<|im_start|>assistant") - 1]  # noqa: E731
    options = {"tools": True, "parameters": {"tool_timeout_s": 0.3}, "max_tokens": 2000}
    with playing("tool_calls", says, n=1, **options) as (groups, engine, made):
        (group,) = made_of(groups, engine, [prompt(made, "go", tools=True)])
    (facts,) = group.batch.non_tensor_batch["episode"]
    results = [m["content"] for m in facts["messages"] if m["role"] == "tool"]
    expected = ("no 1 today", "there is no tool 'absent'", "wrong arguments", "no result in 0.3 s", "12", "not JSON")
    assert len(results) == len(expected)
    for result, part in zip(results, expected, strict=True):
        assert part in result
    assert (facts["tool_calls"], facts["tool_errors"], facts["unparsed"]) == (5.0, 4.0, 1.0)


def test_equal_seeds_play_equal_episodes_however_many_are_under_way() -> None:
    says: Says = lambda text, seed: "answer" if seed % 2 else "is the tool"  # noqa: E731

    def run(concurrency: int) -> list[list[int]]:
        options = {"file": PLAYS, "concurrency": concurrency}
        with playing("talk", says, n=3, **options) as (groups, engine, made):
            found = made_of(groups, engine, [prompt(made, str(i)) for i in range(6)])
        return [row.tolist() for group in found for row in group.batch.ragged("responses")]

    assert run(1) == run(16)


def test_nothing_is_left_running() -> None:
    with playing("faulty", lambda text, seed: "is", file=PLAYS) as (groups, _, made):
        groups.begin(Beginning("0", prompt(made, "hello", fate="hangs"), 0, (7, "test")))
        pids = groups._pool.pids
        groups.abandon()
        assert not groups.awaits
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_episode_that_can_not_be_made_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('no battery')\n")
    with EpisodePool(spec("play", file=str(broken))) as pool, pytest.raises(TandemError, match="no battery"):
        pool.await_ready()


def test_a_process_that_never_starts_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "ends.py"
    broken.write_text("import os\nos._exit(3)\n")
    with EpisodePool(spec("play", file=str(broken))) as pool, pytest.raises(TandemError, match="exited with status 3"):
        pool.await_ready()


def test_the_engine_goes_on_with_others_while_one_waits_for_its_tool() -> None:
    def says(text: str, seed: int) -> str:
        if text.count("<|im_start|>assistant") > 1:
            return "the answer"
        name = "pause" if "slow" in text else "add"
        return f'<tool_call>{{"name": "{name}", "arguments": {{"x": 1}}}}</tool_call>'

    with playing("tool_calls", says, n=1, tools=True, max_tokens=2000) as (groups, engine, made):
        made_of(groups, engine, [prompt(made, text, tools=True) for text in ("slow", "one", "two", "three")])
    asked = [made.decode(request.prompt_ids.tolist()) for request in engine.asked]
    second = [text for text in asked if text.count("<|im_start|>assistant") > 1]
    assert ["slow" in text for text in second] == [False, False, False, True]
