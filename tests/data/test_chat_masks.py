"""Loss masks of conversations: the assistant's text and the end of its turn, or an error; never something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tandem.base.errors import DataError
from tandem.data.catalog import OnBadRow
from tandem.data.chat import encode_conversation, encode_pair
from tandem.data.examples import ConversationSource, ExampleColumns
from tandem.data.length import Overlong
from tandem.data.rows import RowsTable
from tandem.models.tokenizer import character_tokenizer

DEFAULT_SYSTEM = "{% if not messages or messages[0]['role'] != 'system' %}<system>S;\n{% endif %}"
THINKING = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('|')[-1] }}{% else %}{{ m['content'] }}"
    "{% endif %};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


conversations = st.lists(
    st.builds(turn, st.sampled_from(["user", "assistant", "tool"]), st.text("ab <;>\n", max_size=6)),
    min_size=1,
    max_size=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(messages=conversations, system=st.booleans())
def test_the_mask_is_that_of_each_character(
    chat_tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], system: bool
) -> None:
    template = chat_tokenizer.chat_template
    chat_tokenizer.chat_template = (DEFAULT_SYSTEM if system else "") + template
    ids, mask = encode_conversation(chat_tokenizer, messages)
    chat_tokenizer.chat_template = template

    text, expected = "<system>S;\n" * system, [0] * (11 * system)
    for message in messages:
        header, body = f"<{message['role']}>", f"{message['content']};\n"
        text += header + body
        expected += [0] * len(header) + [int(message["role"] == "assistant")] * len(body)
    assert chat_tokenizer.decode(ids) == text
    assert mask == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    messages=st.lists(
        st.builds(turn, st.sampled_from(["user", "assistant"]), st.text("yes no\n😀正", max_size=8)),
        min_size=1,
        max_size=5,
    )
)
def test_a_byte_level_tokenizer_keeps_the_tokens_of_the_whole(
    byte_level: PreTrainedTokenizerFast, messages: list[dict[str, str]]
) -> None:
    ids, mask = encode_conversation(byte_level, messages)
    assert ids == byte_level.apply_chat_template(messages, return_dict=False)
    learned = "".join(byte_level.decode([i]) if m else "" for i, m in zip(ids, mask, strict=True) if i < 2)
    assert learned == "<|im_end|>" * sum(m["role"] == "assistant" for m in messages)
    runs = byte_level.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert runs == "".join(m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant")


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = THINKING
    once = [turn("user", "q"), turn("assistant", "hm|yes")]
    ids, mask = encode_conversation(tokenizer, once)
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "hm|yes;"
    with pytest.raises(DataError, match=r"no loss mask for message 2: the template renders.*\{% generation %\}"):
        encode_conversation(tokenizer, [*once, turn("user", "r")])


def test_generation_marks_serve_where_prefixes_do_not(tokenizer: PreTrainedTokenizerFast) -> None:
    body = "{{ m['content'].split('|')[-1] if not loop.last else m['content'] }};"
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}"
        + body
        + "{% endgeneration %}{% else %}{{ m['content'] }};{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [turn("user", "q"), turn("assistant", "hm|yes"), turn("user", "r"), turn("assistant", "so|no")]
    ids, mask = encode_conversation(tokenizer, messages)
    assert tokenizer.decode(ids) == "<user>q;<assistant>yes;<user>r;<assistant>so|no;"
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "yes;so|no;"


def test_a_header_is_never_learned_as_text(tokenizer: PreTrainedTokenizerFast) -> None:
    headers = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
    tokenizer.chat_template = headers
    with pytest.raises(DataError, match="ignores add_generation_prompt, and the turn begins with '<assistant>"):
        encode_conversation(tokenizer, [turn("user", "q"), turn("assistant", "yes")])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] }}]{% else %}{{ m['content'] }};"
        "{% endif %}{% endfor %}"
    )
    ids, mask = encode_conversation(tokenizer, [turn("user", "q"), turn("assistant", "yes")])
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "yes;"


def test_a_token_that_spans_header_and_text_is_refused(byte_level: PreTrainedTokenizerFast) -> None:
    template = byte_level.chat_template
    try:
        byte_level.chat_template = (
            "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        )
        with pytest.raises(DataError, match="a token spans the boundary after"):
            encode_conversation(byte_level, [turn("user", "q"), turn("assistant", "yes")])
    finally:
        byte_level.chat_template = template


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "not a str"),
        ([], "the list of messages is empty"),
        ([turn("user", "q"), {"role": "assistant", "content": None}], r"message 2 \(assistant\) has no content"),
        ([{"content": "x"}], r"message 1 has no role \(it has content\)"),
        ([7], "message 1 is a int"),
    ],
)
def test_malformed_conversations_are_named(
    chat_tokenizer: PreTrainedTokenizerFast, messages: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        encode_conversation(chat_tokenizer, messages)


def test_a_refusal_of_the_template_is_a_data_error(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="refuses messages with roles user: roles must alternate"):
        encode_conversation(tokenizer, [turn("user", "q")])


def test_a_pair_learns_the_response_and_its_end(tokenizer: PreTrainedTokenizerFast) -> None:
    ids, mask = encode_pair(tokenizer, " 1+ 2=", "3")
    assert ids == [*tokenizer(" 1+ 2=3")["input_ids"], tokenizer.eos_token_id]
    assert mask == [0] * 6 + [1, 1]
    assert encode_pair(tokenizer, "a", "b", add_eos=False)[0] == tokenizer("ab")["input_ids"]
    newline = character_tokenizer("\nab", eos="\n", pad=None)
    assert encode_pair(newline, "a", "b\n") == (newline("ab\n")["input_ids"], [0, 1, 1])


def test_a_pair_continues_the_ids_of_the_prompt(byte_level: PreTrainedTokenizerFast) -> None:
    # " yes" is one token of the whole text, but a model that is asked to continue "is " never sees it.
    prompt, whole = byte_level("the answer is ")["input_ids"], byte_level("the answer is yes")["input_ids"]
    assert whole[: len(prompt)] != prompt
    ids, mask = encode_pair(byte_level, "the answer is ", "yes")
    assert ids[: len(prompt)] == prompt
    assert byte_level.decode(ids) == "the answer is yes<|im_end|>"
    assert mask == [0] * len(prompt) + [1] * (len(ids) - len(prompt))


@pytest.fixture
def make(chat_tokenizer: PreTrainedTokenizerFast) -> Callable[..., ConversationSource]:
    def make_source(rows: list[Any], columns: ExampleColumns | None = None, **options: Any) -> ConversationSource:
        settings = {"tokenizer": chat_tokenizer, "max_length": 40, **options}
        return ConversationSource([RowsTable("rows", rows)], columns=columns or ExampleColumns(), **settings)

    return make_source


def test_conversations_and_pairs_are_drawn_like_prompts(
    make: Callable[..., ConversationSource], chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"prompt": f"{i}", "response": f"{i + 1}"} for i in range(5)]
    source = make(rows, epochs=2, seed=1)
    drawn = source.take(3)
    again = make(rows, epochs=2, seed=1, streaming=True)
    again.load_state_dict(source.state_dict())
    drawn += again.take(99)
    assert sorted(e.uid for e in drawn) == sorted([f"0:{i}" for i in range(1, 6)] * 2)
    assert [list(source.items[0].input_ids), list(source.items[0].loss_mask)] == list(
        encode_pair(chat_tokenizer, "0", "1")
    )

    talk = [turn("user", "a"), turn("assistant", "b")]
    (whole,) = make([{"talk": talk}], ExampleColumns(messages_key="talk")).items
    assert (list(whole.input_ids), list(whole.loss_mask)) == encode_conversation(chat_tokenizer, talk)
    (paired,) = make([{"prompt": "a", "response": "b"}], ExampleColumns(chat=True)).items
    assert paired.input_ids == whole.input_ids


def test_examples_have_a_length_policy(make: Callable[..., ConversationSource]) -> None:
    rows = [{"prompt": "p" * 10, "response": "r" * 60}, {"prompt": "p", "response": "r"}]
    with pytest.raises(DataError, match="rows, row 1: the example has 71 tokens, more than max_length = 40"):
        make(rows)
    assert make(rows, on_overlong=Overlong.DROP).counts.dropped == {"overlong": 1}
    short = make(rows, on_overlong=Overlong.RIGHT)
    assert list(short.items[0].loss_mask) == [0] * 10 + [1] * 30
    assert short.counts.cut == 1


def test_an_example_with_nothing_to_learn_is_a_bad_row(make: Callable[..., ConversationSource]) -> None:
    columns = ExampleColumns(messages_key="messages")
    rows = [{"messages": [turn("user", "only")]}, {"messages": [turn("user", "q"), turn("assistant", "a")]}]
    with pytest.raises(DataError, match="row 1: no token of it would be learned"):
        make(rows, columns)
    assert make(rows, columns, on_bad_row=OnBadRow.DROP).counts.dropped == {"nothing to learn": 1}
    with pytest.raises(DataError, match="row 1: column 'response' is 3, not text"):
        make([{"prompt": "a", "response": 3}])
