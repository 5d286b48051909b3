"""Rows of preferences: pairs and labelled answers, text and conversations; what can't be compared is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tandem.base.errors import DataError
from tandem.data.catalog import OnBadRow
from tandem.data.length import Overlong
from tandem.data.preferences import Lengths, Preference, PreferenceColumns, PreferenceSource
from tandem.data.prompts import PromptColumns
from tandem.data.rows import RowsTable

Make = Callable[..., PreferenceSource]
PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "five"}


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture
def make(chat_tokenizer: PreTrainedTokenizerFast) -> Make:
    def make_source(
        rows: Sequence[Any], *, prompt: PromptColumns | None = None, lengths: Lengths | None = None, **options: Any
    ) -> PreferenceSource:
        named = {key: options.pop(key) for key in ("label", "chosen", "rejected", "response") if key in options}
        return PreferenceSource(
            [RowsTable("rows", rows)],
            tokenizer=chat_tokenizer,
            columns=PreferenceColumns(PromptColumns() if prompt is None else prompt, **named),
            lengths=Lengths(60, 60) if lengths is None else lengths,
            **options,
        )

    return make_source


def told(tokenizer: PreTrainedTokenizerFast, item: Preference) -> tuple[str, list[tuple[str, str, bool]]]:
    """The prompt, and of each answer its text, the learned part of it, and whether it is preferred."""
    answers = []
    for answer in item.answers:
        learned = [i for i, m in zip(answer.ids, answer.learned, strict=True) if m]
        answers.append((tokenizer.decode(answer.ids), tokenizer.decode(learned), answer.preferred))
    return tokenizer.decode(item.prompt_ids), answers


def test_a_pair_of_texts_ends_with_the_end_token(make: Make, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    (item,) = make([PAIR]).items
    prompt, (chosen, rejected) = told(chat_tokenizer, item)
    assert (prompt, chosen, rejected) == ("2+2=", ("4<eos>", "4<eos>", True), ("five<eos>", "five<eos>", False))
    assert (item.uid, item.data_source, item.cut) == ("0:1", "rows", False)


def test_columns_and_template_are_named(make: Make, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    row = {"q": 7, "win": "a", "lose": "b"}
    (item,) = make([row], prompt=PromptColumns(template="{q}?"), chosen="win", rejected="lose").items
    assert told(chat_tokenizer, item) == ("7?", [("a<eos>", "a<eos>", True), ("b<eos>", "b<eos>", False)])


@pytest.mark.parametrize(("label", "good"), [(True, True), (False, False), (1, True), (0, False)])
def test_a_labelled_answer_stands_alone(
    make: Make, chat_tokenizer: PreTrainedTokenizerFast, label: object, good: bool
) -> None:
    (item,) = make([{"prompt": "p", "response": "r", "good": label}], label="good").items
    assert told(chat_tokenizer, item) == ("p", [("r<eos>", "r<eos>", good)])


def test_chat_wraps_texts_and_a_system_prompt(make: Make, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    (item,) = make([PAIR], prompt=PromptColumns(chat=True, system_prompt="Sum.")).items
    prompt, answers = told(chat_tokenizer, item)
    assert prompt == "<system>Sum.;\n<user>2+2=;\n<assistant>"
    assert answers == [("4;\n", "4;\n", True), ("five;\n", "five;\n", False)]


PROMPT = [turn("system", "S"), turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
GOOD, BAD = turn("assistant", "good"), turn("assistant", "bad")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": PROMPT, "chosen": "good", "rejected": "bad"},
        {"prompt": PROMPT, "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": PROMPT, "chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]},
        {"prompt": "the question again", "chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]},
        {"chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]},
    ],
    ids=["texts", "messages", "whole conversations", "whole, and a prompt", "whole, no prompt"],
)  # fmt: skip
def test_conversations_in_every_form_are_the_same(
    make: Make, chat_tokenizer: PreTrainedTokenizerFast, row: dict[str, Any]
) -> None:
    (item,) = make([row]).items
    prompt, answers = told(chat_tokenizer, item)
    assert prompt == "<system>S;\n<user>a;\n<assistant>b;\n<user>c;\n<assistant>"
    assert answers == [("good;\n", "good;\n", True), ("bad;\n", "bad;\n", False)]


def test_only_the_assistant_is_learned_where_an_answer_has_several_turns(
    make: Make, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    talk = [turn("assistant", "x"), turn("user", "why"), turn("assistant", "y")]
    (item,) = make([{"prompt": "q", "chosen": talk, "rejected": [BAD]}]).items
    prompt, (chosen, _) = told(chat_tokenizer, item)
    assert prompt == "<user>q;\n<assistant>"
    assert chosen == ("x;\n<user>why;\n<assistant>y;\n", "x;\ny;\n", True)


def test_a_labelled_conversation_is_asked_by_all_but_its_last_turn(
    make: Make, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    (item,) = make([{"response": [*PROMPT, GOOD], "good": False}], label="good").items
    prompt, answers = told(chat_tokenizer, item)
    assert prompt.endswith("<user>c;\n<assistant>") and answers == [("good;\n", "good;\n", False)]


def test_an_earlier_turn_needs_no_mask(make: Make, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    """A template may shorten the assistant's earlier turns: they are part of the prompt, as it renders them."""
    chat_tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>"
        "{{ m['content'] if loop.last else m['content'].split('|')[-1] }};{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    talk = [turn("user", "a"), turn("assistant", "hm|b"), turn("user", "c")]
    (item,) = make([{"prompt": talk, "chosen": "so|x", "rejected": "y"}]).items
    prompt, answers = told(chat_tokenizer, item)
    assert prompt == "<user>a;<assistant>b;<user>c;<assistant>"
    assert answers[0] == ("so|x;", "so|x;", True)


@pytest.mark.parametrize(
    ("row", "options", "said"),
    [
        ({"prompt": "p", "rejected": "b"}, {}, "no column 'chosen' among prompt, rejected"),
        ({"prompt": "p", "chosen": "a", "rejected": None}, {}, "column 'rejected' is null"),
        ({"prompt": "p", "chosen": "a", "rejected": 7}, {}, "column 'rejected': a conversation is a list"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, {}, "hold the same answer"),
        ({"prompt": "p", "chosen": "a", "rejected": [BAD]}, {}, "is text, the other is messages"),
        ({"prompt": "p", "chosen": [GOOD], "rejected": [GOOD]}, {}, "hold the same answer"),
        ({"chosen": "a", "rejected": "b"}, {}, "no column 'prompt'"),
        ({"chosen": [turn("user", "a"), GOOD], "rejected": [turn("user", "b"), BAD]}, {}, "no beginning in common"),
        ({"prompt": "p", "response": "r", "good": "yes"}, {"label": "good"}, "is 'yes': write true for a good answer"),
        ({"prompt": "p", "response": "r"}, {"label": "good"}, "no column 'good'"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, {}, "the prompt is empty"),
        ({"prompt": "p", "chosen": "ä", "rejected": "b"}, {}, "column 'chosen': the tokenizer has no token for 'ä'"),
    ],
)
def test_what_can_not_be_compared_is_named_or_counted(
    make: Make, row: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match="rows, row 2") as error:
        good = PAIR if not options else {"prompt": "p", "response": "r", "good": True}
        make([good, row], **options)
    assert said in str(error.value)
    kept = make([good, row], on_bad_row=OnBadRow.DROP, **options)
    assert (kept.counts.rows, kept.counts.kept, sum(kept.counts.dropped.values())) == (2, 1, 1)


def test_lengths_have_policies_of_their_own(make: Make, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"prompt": "prompt", "chosen": "abcdef", "rejected": "abcxyz"},
        {"prompt": "p", "chosen": "a", "rejected": "b"},
    ]
    with pytest.raises(DataError, match="row 1: the prompt has 6 tokens, more than max_prompt_length = 3"):
        make(rows, lengths=Lengths(3, 9))
    with pytest.raises(DataError, match="row 1: 'chosen' has 7 tokens, more than max_response_length = 4"):
        make(rows, lengths=Lengths(9, 4))
    dropped = make(rows, lengths=Lengths(3, 9, on_overlong_prompt=Overlong.DROP))
    assert dropped.counts.dropped == {"overlong": 1}
    dropped = make(rows, lengths=Lengths(9, 4, on_overlong_response=Overlong.DROP))
    assert dropped.counts.dropped == {"overlong answer": 1}
    cut = make(rows, lengths=Lengths(3, 4, Overlong.LEFT, Overlong.RIGHT))
    assert told(chat_tokenizer, cut.items[0]) == ("mpt", [("abcd", "abcd", True), ("abcx", "abcx", False)])
    assert cut.counts.cut == 1
    with pytest.raises(DataError, match="hold the same answer"):
        make(rows, lengths=Lengths(9, 3, on_overlong_response=Overlong.RIGHT))


def test_prompts_that_are_held_out_are_left_out(make: Make) -> None:
    rows = [{**PAIR, "prompt": f"{i}"} for i in range(4)]
    held = [RowsTable("held", [{**PAIR, "prompt": "2", "chosen": "other"}])]
    source = make(rows, held_out=held)
    assert source.counts.dropped == {"held out": 1}
    assert [item.text for item in source.items] == ["0", "1", "3"]


def test_draws_resume_from_memory_and_from_disk(make: Make) -> None:
    rows = [{**PAIR, "prompt": f"{i}"} for i in range(5)]
    one, other = make(rows, epochs=2, seed=3), make(rows, epochs=2, seed=3, streaming=True)
    taken = one.take(4)
    other.load_state_dict(one.state_dict())
    assert sorted(item.uid for item in [*taken, *other.take(9)]) == sorted([f"0:{i}" for i in range(1, 6)] * 2)
    with pytest.raises(DataError, match="not those of the saved run"):
        make([{**row, "chosen": "5"} for row in rows], seed=3).load_state_dict(one.state_dict())
