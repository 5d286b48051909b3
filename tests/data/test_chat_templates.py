"""Loss masks under the ways in which chat templates are written, token by token against the whole rendered text.

Each way is there twice: as a template, and as plain Python that says of every character whether it is the assistant's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tandem.base.errors import DataError
from tandem.data.chat import Message, encode_conversation
from tandem.data.examples import ConversationSource, ExampleColumns
from tandem.data.rows import RowsTable

Segments = list[tuple[str, bool]]
"""Texts, and whether they are learned."""


@dataclass(frozen=True)
class Way:
    """A template and the segments of what it renders."""

    template: str
    segments: Callable[[list[Message], Any], Segments]


TAGGED = """\
{%- if tools %}<|im_start|>system
{{ messages[0]['content'] if messages[0]['role'] == 'system' else 'Help.' }}
# Tools {{ tools | tojson }}<|im_end|>
{% elif messages[0]['role'] != 'system' %}<|im_start|>system
Help.<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m['role'] == 'tool' %}
{%- if loop.previtem is not defined or loop.previtem['role'] != 'tool' %}<|im_start|>user{% endif %}
<tool_response>{{ m['content'] }}</tool_response>
{%- if loop.last or loop.nextitem['role'] != 'tool' %}<|im_end|>
{% endif %}
{%- elif not (tools and loop.first and m['role'] == 'system') %}<|im_start|>{{ m['role'] }}
{{ m['content'] or '' }}
{%- for call in m['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tagged(messages: list[Message], tools: Any) -> Segments:
    system = messages[0]["role"] == "system"
    start: Segments = []
    if tools:
        told = json.dumps(tools, ensure_ascii=False)
        prompt = messages[0]["content"] if system else "Help."
        start = [(f"<|im_start|>system\n{prompt}\n# Tools {told}<|im_end|>\n", False)]
        messages = messages[system:]
    elif not system:
        start = [("<|im_start|>system\nHelp.<|im_end|>\n", False)]
    for i, m in enumerate(messages):
        if m["role"] == "tool":
            opened = i == 0 or messages[i - 1]["role"] != "tool"
            closed = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            text = f"<tool_response>{m['content']}</tool_response>"
            start.append(("<|im_start|>user" * opened + text + "<|im_end|>\n" * closed, False))
            continue
        calls = (json.dumps(call["function"], ensure_ascii=False) for call in m.get("tool_calls", []))
        body = m.get("content", "") + "".join(f"<tool_call>{call}</tool_call>" for call in calls)
        start += [(f"<|im_start|>{m['role']}\n", False), (f"{body}<|im_end|>\n", m["role"] == "assistant")]
    return start


HEADERS = """\
{{ '<|begin|>' }}{% for m in messages %}<|head|>{{ m['role'] }}<|/head|>

{{ m['content'] | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>

{% endif %}"""


def headers(messages: list[Message], tools: Any) -> Segments:
    parts: Segments = [("<|begin|>", False)]
    for m in messages:
        parts.append((f"<|head|>{m['role']}<|/head|>\n\n", False))
        parts.append((f"{m['content'].strip()}<|eot|>", m["role"] == "assistant"))
    return parts


RENAMED = """\
<bos>{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}<start_of_turn>\
{{ 'model' if m['role'] == 'assistant' else m['role'] }}
{{ m['content'] }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


def renamed(messages: list[Message], tools: Any) -> Segments:
    parts: Segments = [("<bos>", False)]
    for m in messages:
        learned = m["role"] == "assistant"
        parts.append((f"<start_of_turn>{'model' if learned else m['role']}\n", False))
        parts.append((f"{m['content']}<end_of_turn>\n", learned))
    return parts


BRACKETS = """\
<s>{% for m in messages %}{% if m['role'] == 'system' %}{% elif m['role'] == 'assistant' %} {{ m['content'] }}</s>\
{% else %}[INST] {% if loop.index0 == 1 and messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}

{% endif %}{{ m['content'] }} [/INST]{% endif %}{% endfor %}"""


def brackets(messages: list[Message], tools: Any) -> Segments:
    """No header opens the assistant's turn, so all of it is written by the assistant, the blank before it too."""
    parts: Segments = [("<s>", False)]
    system = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
    for i, m in enumerate(messages):
        if m["role"] == "assistant":
            parts.append((f" {m['content']}</s>", True))
        elif m["role"] != "system":
            parts.append((f"[INST] {system if i == 1 else ''}{m['content']} [/INST]", False))
    return parts


WAYS = {
    "tagged": Way(TAGGED, tagged),
    "headers": Way(HEADERS, headers),
    "renamed": Way(RENAMED, renamed),
    "brackets": Way(BRACKETS, brackets),
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"x": "number"}}}]
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]


@st.composite
def talks(draw: st.DrawFn, *, system: bool = True, tools: bool = False) -> list[Message]:
    """A conversation that begins with the user, perhaps after a system prompt; assistant turns may be empty."""
    text = st.text("ab yes\n<|>", max_size=6)
    talk: list[Message] = []
    if system and draw(st.booleans()):
        talk.append({"role": "system", "content": draw(text)})
    for _ in range(draw(st.integers(1, 3))):
        talk.append({"role": "user", "content": draw(text)})
        if tools and draw(st.booleans()):
            said = draw(st.none() | text)
            talk.append({"role": "assistant", "tool_calls": CALL} | ({} if said is None else {"content": said}))
            talk += [{"role": "tool", "content": draw(text)} for _ in range(draw(st.integers(1, 2)))]
        talk.append({"role": "assistant", "content": draw(text)})
    return talk


def agree(tokenizer: PreTrainedTokenizerFast, way: Way, talk: list[Message], tools: Any = None) -> None:
    """Ids are those of the whole text; each token is learned exactly if its characters are the assistant's.

    A beginning of the text that has other tokens alone than within the whole is one that a model is never asked to
    continue so: then the conversation is refused.
    """
    tokenizer.chat_template = way.template
    segments = way.segments(talk, tools)
    text = "".join(part for part, _ in segments)
    assert text == tokenizer.apply_chat_template(talk, tools=tools, tokenize=False)
    learned = [flag for part, flag in segments for _ in part]
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = [set(learned[start:end]) for start, end in whole["offset_mapping"]]
    if not all(_stands_alone(tokenizer, text, whole["input_ids"], end) for end in _boundaries(segments)):
        with pytest.raises(DataError, match="a token spans the boundary"):
            encode_conversation(tokenizer, talk, tools=tools)
        return
    ids, mask = encode_conversation(tokenizer, talk, tools=tools)
    assert ids == whole["input_ids"]
    expected, ended = [], False
    for token, span in zip(ids, spans, strict=True):
        ended = ended and True in span  # nothing of a turn is learned after its end token
        expected.append(int(True in span and not ended))
        ended = ended or (True in span and token == tokenizer.eos_token_id)
    assert mask == expected


@pytest.mark.parametrize("name", WAYS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(data=st.data())
def test_every_character_is_masked_as_its_template_has_it(
    tokenizer: PreTrainedTokenizerFast, name: str, data: st.DataObject
) -> None:
    agree(tokenizer, WAYS[name], data.draw(talks(system=name != "renamed")))


def _boundaries(segments: Segments) -> Iterator[int]:
    """Where a learned segment begins or ends, in characters."""
    place = 0
    for part, flag in segments:
        if flag:
            yield from (place, place + len(part))
        place += len(part)


def _stands_alone(tokenizer: PreTrainedTokenizerFast, text: str, ids: list[int], end: int) -> bool:
    part = tokenizer(text[:end], add_special_tokens=False)["input_ids"]
    return bool(ids[: len(part)] == part)


@pytest.mark.parametrize("name", ["tagged", "renamed", "brackets"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(data=st.data())
def test_every_token_of_a_byte_level_tokenizer_too(
    byte_level: PreTrainedTokenizerFast, name: str, data: st.DataObject
) -> None:
    agree(byte_level, WAYS[name], data.draw(talks(system=name != "renamed")))


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(talk=talks(tools=True))
def test_calls_of_tools_are_learned_and_their_results_are_not(
    tokenizer: PreTrainedTokenizerFast, tools: Any, talk: list[Message]
) -> None:
    agree(tokenizer, WAYS["tagged"], talk, tools)


def test_an_empty_assistant_turn_learns_its_end(tokenizer: PreTrainedTokenizerFast) -> None:
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]
    ends = {"tagged": "<|im_end|>\n", "headers": "<|eot|>", "renamed": "<end_of_turn>\n", "brackets": " </s>"}
    for name, end in ends.items():
        tokenizer.chat_template = WAYS[name].template
        ids, mask = encode_conversation(tokenizer, talk)
        assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == end


def test_a_template_without_a_place_for_a_system_prompt_says_so(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = RENAMED
    with pytest.raises(DataError, match="refuses messages with roles system, user, assistant: no system"):
        encode_conversation(tokenizer, [{"role": r, "content": "x"} for r in ("system", "user", "assistant")])


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["as values", "as JSON text"])
def test_tool_definitions_come_with_the_row(tokenizer: PreTrainedTokenizerFast, tools: Any) -> None:
    tokenizer.chat_template = TAGGED
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": CALL}]
    rows = [{"messages": talk, "tools": tools}, {"messages": talk, "tools": None}]

    def source(rows: list[Any]) -> ConversationSource:
        columns = ExampleColumns(messages_key="messages", tools_key="tools")
        return ConversationSource([RowsTable("rows", rows)], tokenizer=tokenizer, columns=columns, max_length=400)

    with_tools, without = (tokenizer.decode(example.input_ids) for example in source(rows).items)
    assert "# Tools [{" in with_tools and "# Tools" not in without
    for wrong, said in (("{", "text, but no JSON"), (3, "write a list of tool definitions")):
        with pytest.raises(DataError, match=said):
            source([{"messages": talk, "tools": wrong}])
