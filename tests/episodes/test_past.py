"""What a turn goes on from: the tokens that are there wherever nothing changed, else a context that begins anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import DataError
from tandem.data.chat import encode_chat_prompt
from tandem.episodes.past import Added, Past, after_ids, after_messages, after_text, check_offer
from tandem.episodes.replies import stopped
from tandem.models.tokenizer import encode_text
from tandem.rollout.protocol import SampleOutput
from tests.episodes.families import FAMILIES, tokenizer
from tests.episodes.test_groups import made_of, playing, prompt

MADE = tokenizer(FAMILIES[0])
END = MADE.eos_token_id
ASKED = [{"role": "user", "content": "what is 1+1"}]
SAID = {"role": "assistant", "content": "the answer is 12"}
NEW = {"role": "user", "content": "is it"}
SPELT = [*"the answer is 12"]
"""The answer as it was sampled: character by character, which no tokenizer would do."""

CONTEXT = [*encode_chat_prompt(MADE, ASKED)[1], *MADE.convert_tokens_to_ids(SPELT), END]


def after(given_: list[dict[str, Any]], past: Past = "edited") -> Added:
    return after_messages(MADE, CONTEXT, [*ASKED, SAID], given_, ends=[END], tools=None, past=past)


@pytest.mark.parametrize("past", ["fixed", "edited", "template"])
def test_what_was_sampled_stays_however_it_was_spelt(past: Past) -> None:
    added = after([*ASKED, SAID, NEW], past)
    assert not added.anew
    whole = encode_chat_prompt(MADE, [*ASKED, SAID, NEW])[1]
    assert MADE.decode(CONTEXT + added.ids) == MADE.decode(whole)


@pytest.mark.parametrize(
    "changed",
    [
        [*ASKED, SAID | {"content": "the answer is 12 "}, NEW],
        [NEW],
        ASKED,
        [{"role": "system", "content": "add"}, *ASKED, SAID, NEW],
        [*ASKED, SAID, SAID | {"content": "no"}, NEW],
    ],
    ids=["a space more", "all dropped", "asked again", "one before", "a turn that nobody sampled"],
)
def test_other_words_begin_anew_and_are_what_the_template_makes_of_them(changed: list[dict[str, Any]]) -> None:
    for past in ("edited", "template"):
        added = after(changed, past)  # type: ignore[arg-type]
        if past == "edited" or added.anew:
            assert added == Added(encode_chat_prompt(MADE, changed)[1], anew=True)
    with pytest.raises(DataError, match=r"is not what it was|nothing follows"):
        after(changed, "fixed")


@given(st.lists(st.sampled_from([*ASKED, SAID, NEW]), min_size=1, max_size=5))
def test_the_next_prompt_says_what_the_messages_say(given_: list[dict[str, Any]]) -> None:
    if given_[-1]["role"] == "assistant":
        with pytest.raises(DataError, match="a prompt ends with the turn"):
            after(given_)
        return
    added = after(given_)
    ids = added.ids if added.anew else CONTEXT + added.ids
    assert MADE.decode(ids) == MADE.decode(encode_chat_prompt(MADE, given_)[1])
    assert added.anew == (given_[:2] != [*ASKED, SAID] or given_[2:3] == [SAID])


def test_texts_and_tokens_go_on_or_begin_anew() -> None:
    text = MADE.decode(CONTEXT)
    assert after_text(MADE, CONTEXT, text + "is", past="fixed") == Added(encode_text(MADE, "is"))
    assert after_text(MADE, CONTEXT, "is", past="edited") == Added(encode_text(MADE, "is"), anew=True)
    assert after_text(MADE, [], "is", past="fixed") == Added(encode_text(MADE, "is"))
    assert after_ids(CONTEXT, [*CONTEXT, 3], past="fixed") == Added([3])
    assert after_ids(CONTEXT, [3], past="edited") == Added([3], anew=True)
    for refused in (
        lambda: after_text(MADE, CONTEXT, "is", past="fixed"),
        lambda: after_ids(CONTEXT, [3], past="fixed"),
    ):
        with pytest.raises(DataError, match="of the turns before"):
            refused()


def test_tools_whose_calls_could_not_be_read_are_not_offered() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    check_offer(MADE, tools, "hermes")
    check_offer(MADE, [], None)
    with pytest.raises(
        DataError, match=r"write actor_rollout_ref\.rollout\.episode\.tool_format, one of hermes, .*pythonic"
    ):
        check_offer(MADE, tools, None)


@given(ids=st.lists(st.sampled_from(MADE.convert_tokens_to_ids([*"ab1", "12", "answer"])), max_size=8))
def test_a_stop_keeps_the_fewest_tokens_that_hold_it(ids: list[int]) -> None:
    sample = SampleOutput(torch.tensor(ids), torch.arange(len(ids)) * -0.1, torch.arange(len(ids)), "length")
    cut, found = stopped(MADE, sample, ["1a", "b2", "12"])
    text, kept = MADE.decode(ids), cut.token_ids.tolist()
    assert kept == ids[: len(kept)] and len(cut.logprobs) == len(cut.versions) == len(kept)
    if not found:
        assert cut is sample and not any(mark in text for mark in ("1a", "b2", "12"))
    else:
        assert cut.finish_reason == "stop" and found in MADE.decode(kept) and found not in MADE.decode(kept[:-1])


def test_a_turn_cut_by_its_own_limit_is_ended_by_tokens_that_nobody_sampled() -> None:
    file = str(Path(__file__).with_name("plays.py"))
    with playing("cut_short", lambda text, seed: "answer 12 is", n=1, file=file) as (groups, engine, made):
        (group,) = made_of(groups, engine, [prompt(made, "hello")])
    (facts,) = group.batch.non_tensor_batch["episode"]
    assert (facts["turns"], facts["cut"]) == (3, "")
    asked = [made.decode(request.prompt_ids.tolist()) for request in engine.asked]
    assert (
        asked[2].count("answer 1<|im_end|>") == 0
        and "answer 12<|im_end|>" in asked[1]
        and "answer <|im_end|>" in asked[2]
    )
    row = group.batch[0].batch
    sampled = [
        token for token, own in zip(row["responses"].tolist(), row["response_mask"].tolist(), strict=True) if own
    ]
    assert made.decode(sampled) == "answer 12answer answer 12 is<|im_end|>"
