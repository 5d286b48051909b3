"""Tools as data hold them: keys that Arrow adds, arguments as JSON text, definitions for prompts and preferences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tandem.base.errors import DataError
from tandem.data.base_source import as_examples, as_rows
from tandem.data.chat import encode_conversation, render_chat
from tandem.data.examples import ConversationSource, ExampleColumns
from tandem.data.files import open_tables
from tandem.data.length import Overlong
from tandem.data.preferences import Lengths, PreferenceColumns, PreferenceSource
from tandem.data.prompts import PromptColumns, PromptSource
from tandem.data.rows import Table
from tandem.data.tools import wants_text
from tests.data.conftest import Write

HEAD = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
TURN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{CALL}</call>{% endfor %};\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ENCODES = HEAD + TURN.replace("{CALL}", "{{ c.function.name }} {{ c.function.arguments | tojson }}")
WHOLE = HEAD + TURN.replace("{CALL}", "{{ c.function | tojson }}")
CONCATENATES = HEAD + TURN.replace("{CALL}", "{{ c.function.name + ' ' + c.function.arguments }}")
WRITES = HEAD + TURN.replace("{CALL}", "{{ c.function.name }} {{ c.function.arguments }}")
EITHER = HEAD + TURN.replace(
    "{CALL}",
    "{{ c.function.name }} {% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}",
)
NAMES = HEAD + TURN.replace(
    "{CALL}", "{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}"
)
WANTS_TEXT = {"encodes": False, "whole": False, "concatenates": True, "writes": True, "either": False, "names": False}
TEMPLATES = {
    "encodes": ENCODES,
    "whole": WHOLE,
    "concatenates": CONCATENATES,
    "writes": WRITES,
    "either": EITHER,
    "names": NAMES,
}

MOVE = {"name": "move", "arguments": {"x": 0, "y": 1}}
GO = {"name": "go", "arguments": {"city": "Rome"}}
STOP = {"name": "stop", "arguments": {}}


def called(function: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "yes"},
    ]


def defined(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ROWS: list[dict[str, Any]] = [
    {"messages": called(MOVE), "tools": [defined("move", x={"type": "integer"}, y={"type": "integer"})]},
    {"messages": called(GO), "tools": [defined("go", city={"type": "string", "enum": ["Rome", "Oslo"]})]},
    {"messages": called(STOP), "tools": None},
]
COLUMNS = ExampleColumns(messages_key="messages", tools_key="tools")


@pytest.fixture
def tools_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = WHOLE
    return tokenizer


def texts(tokenizer: PreTrainedTokenizerFast, tables: list[Table]) -> list[str]:
    source = ConversationSource(tables, tokenizer=tokenizer, columns=COLUMNS, max_length=4000)
    return [tokenizer.decode(example.input_ids) for example in source.items]


def test_keys_that_arrow_adds_are_learned_no_more_than_from_jsonl(
    tools_tokenizer: PreTrainedTokenizerFast, write: Write
) -> None:
    from_lines = texts(tools_tokenizer, open_tables([write("a.jsonl", ROWS)]))
    assert "null" not in "".join(from_lines) and '"arguments": {}' in from_lines[2]
    parquet = write("a.parquet", ROWS)
    (call,) = pq.read_table(parquet)["messages"][0].as_py()[1]["tool_calls"]
    assert {"city", "x", "y"} <= call["function"]["arguments"].keys()
    from_parquet = texts(tools_tokenizer, open_tables([parquet]))
    assert sorted_keys(from_parquet) == sorted_keys(from_lines)
    datasets = pytest.importorskip("datasets")
    assert sorted_keys(texts(tools_tokenizer, [as_rows(datasets.Dataset.from_list(ROWS), name="rows")])) == sorted_keys(
        from_lines
    )
    streamed = as_rows(datasets.Dataset.from_list(ROWS).to_iterable_dataset(), name="rows")
    assert sorted_keys(texts(tools_tokenizer, [streamed])) == sorted_keys(from_lines)
    examples = as_examples(datasets.Dataset.from_list(ROWS), tokenizer=tools_tokenizer)
    assert sorted_keys([tools_tokenizer.decode(e.input_ids) for e in examples]) == sorted_keys(from_lines)


def sorted_keys(found: list[str]) -> list[str]:
    """Arrow has an order of keys of its own, which is no matter here."""
    return ["".join(sorted(text)) for text in found]


ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(0, 9),
        "t": st.text("ab", max_size=2),
        "m": st.fixed_dictionaries({}, optional={"u": st.integers(0, 9), "v": st.lists(st.booleans(), max_size=2)}),
        "l": st.lists(st.fixed_dictionaries({"w": st.integers(0, 9)}, optional={"z": st.text("ab")}), max_size=2),
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(rows=st.lists(ARGUMENTS, min_size=2, max_size=5))
def test_at_every_depth_a_row_has_its_own_keys(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path, full = tmp_path / "a.parquet", {"n": 1, "t": "a", "m": {"u": 1, "v": [True]}, "l": [{"w": 1, "z": "b"}]}
    rows = [full, *rows]
    pq.write_table(pa.Table.from_pylist([{"messages": [{"role": "user", "x": row}]} for row in rows]), path)
    read: list[Any] = [row.nested("messages") for row in open_tables([path])[0].scan()]  # type: ignore[union-attr]
    found = [(message[0].get("x") or {}) for message in read]
    assert found == rows


def test_null_keys_are_kept_by_choice_and_where_they_were_written(
    tools_tokenizer: PreTrainedTokenizerFast, write: Write
) -> None:
    rows = [{"messages": called({"name": "go", "arguments": {"city": None}}), "tools": None}]
    assert '"city": null' in texts(tools_tokenizer, open_tables([write("a.jsonl", rows)]))[0]
    parquet = write("a.parquet", [*ROWS, *rows])
    assert "null" not in "".join(texts(tools_tokenizer, open_tables([parquet])))
    assert '"city": null' in texts(tools_tokenizer, open_tables([parquet], keep_nulls=True))[3]
    assert '"city": null' in texts(tools_tokenizer, [as_rows(rows, name="rows", keep_nulls=True)])[0]


def test_a_map_column_is_a_mapping(tools_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    arguments = pa.map_(pa.string(), pa.string())
    call = pa.struct([("function", pa.struct([("name", pa.string()), ("arguments", arguments)]))])
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))])
    row = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "go", "arguments": [("city", "Rome")]}}]},
    ]
    table = pa.table({"messages": pa.array([row], pa.list_(message)), "tools": pa.array([None], pa.string())})
    pq.write_table(table, tmp_path / "a.parquet")
    assert '"arguments": {"city": "Rome"}' in texts(tools_tokenizer, open_tables([tmp_path / "a.parquet"]))[0]


# --- arguments as JSON text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_are_encoded_once_whatever_the_data_hold_and_the_template_wants(
    tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    tokenizer.chat_template = TEMPLATES[name]
    assert wants_text(tokenizer) is WANTS_TEXT[name]
    shown = {
        json.dumps(form): render_chat(
            tokenizer, called({"name": "go", "arguments": form}), add_generation_prompt=False
        ).partition("<call>")[2]
        for form in ({"city": "Rome"}, '{"city": "Rome"}')
    }
    assert len(set(shown.values())) == 1
    text = next(iter(shown.values()))
    assert text.startswith(
        {
            "names": "go city=Rome</call>",
            "whole": '{"name": "go", "arguments": {"city": "Rome"}}</call>',
        }.get(name, 'go {"city": "Rome"}</call>')
    )


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": json.dumps([{"function": {"name": "go", "arguments": {"city": "Rome"}}}])},
        {"tool_calls": [{"function": {"name": "go", "arguments": '{"city": "Rome"}'}}]},
    ],
    ids=["all of it as text", "arguments as text"],
)
def test_calls_as_text_are_learned_as_calls(tools_tokenizer: PreTrainedTokenizerFast, message: dict[str, Any]) -> None:
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", **message}]
    ids, mask = encode_conversation(tools_tokenizer, talk)
    learned = tools_tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert learned.startswith('<call>{"name": "go", "arguments": {"city": "Rome"}}</call>')


def test_no_arguments_as_empty_text(tools_tokenizer: PreTrainedTokenizerFast) -> None:
    text = render_chat(tools_tokenizer, called({"name": "stop", "arguments": ""}), add_generation_prompt=False)
    assert '"arguments": {}' in text


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([{"function": {"name": "go", "arguments": "to Rome"}}], "message 2.*'go'.*'to Rome', no JSON object"),
        ([{"function": {"name": "go", "arguments": "[1]"}}], "no JSON object: write a mapping"),
        ([{"function": {"name": "go", "arguments": '{"a": ' * 100_000}}], "no JSON object"),
        ("[{", "message 2: tool_calls is text, but no JSON"),
        ("3", "message 2: tool_calls is '3': write a list"),
        (["go"], "write a list of calls"),
    ],
)
def test_malformed_calls_are_refused(tools_tokenizer: PreTrainedTokenizerFast, calls: Any, said: str) -> None:
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}]
    with pytest.raises(DataError, match=said):
        encode_conversation(tools_tokenizer, talk)


def test_a_model_s_own_call_is_as_it_was_where_nothing_must_change(tools_tokenizer: PreTrainedTokenizerFast) -> None:
    talk = called(GO)
    before = json.dumps(talk)
    encode_conversation(tools_tokenizer, talk)
    assert json.dumps(talk) == before


# --- definitions for prompts and preferences --------------------------------------------------------------------------

TOOLS = [defined("go", city={"type": "string"})]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])]], ids=["list", "text", "texts"])
def test_prompts_show_the_tools_of_their_row(tools_tokenizer: PreTrainedTokenizerFast, tools: Any) -> None:
    rows = [{"prompt": [{"role": "user", "content": "q"}], "tools": tools}, {"prompt": "q", "tools": None}]
    columns = PromptColumns(tools_key="tools", chat=True)
    source = PromptSource(
        [as_rows(rows, name="rows")], tokenizer=tools_tokenizer, columns=columns, max_prompt_length=500, shuffle=False
    )
    assert [prompt.text for prompt in source.items] == [
        f"<tools>{json.dumps(TOOLS)}</tools><user>q;\n<assistant>",
        "<user>q;\n<assistant>",
    ]
    assert list(source.items[0].prompt_ids) == tools_tokenizer.encode(source.items[0].text)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "user", "content": "q"}], "chosen": "yes", "rejected": "no"},
        {
            "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}],
            "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "no"}],
        },
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
    ],
    ids=["answers as text", "whole conversations", "all as text"],
)
def test_preferences_are_of_the_prompt_with_its_tools(
    tools_tokenizer: PreTrainedTokenizerFast, row: dict[str, Any]
) -> None:
    source = PreferenceSource(
        [as_rows([{**row, "tools": TOOLS}], name="rows")],
        tokenizer=tools_tokenizer,
        columns=PreferenceColumns(PromptColumns(chat=True, tools_key="tools")),
        lengths=Lengths(500, 50),
    )
    (found,) = source.items
    assert found.text == f"<tools>{json.dumps(TOOLS)}</tools><user>q;\n<assistant>"
    assert [tools_tokenizer.decode(answer.ids) for answer in found.answers] == ["yes;\n", "no;\n"]


def test_tools_without_a_place_are_refused(
    tools_tokenizer: PreTrainedTokenizerFast, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    table = as_rows([{"prompt": "q", "tools": TOOLS}], name="rows")

    def prompts(tokenizer: PreTrainedTokenizerFast, *, chat: bool) -> PromptSource:
        columns = PromptColumns(tools_key="tools", chat=chat)
        return PromptSource(
            [table], tokenizer=tokenizer, columns=columns, max_prompt_length=500, on_overlong=Overlong.ERROR
        )

    with pytest.raises(DataError, match="row 1: tools belong to chat messages: write chat: true"):
        prompts(tools_tokenizer, chat=False)
    with pytest.raises(DataError, match="has no place for tools"):
        prompts(chat_tokenizer, chat=True)
    with pytest.raises(DataError, match="has no place for tools"):
        ConversationSource([table], tokenizer=chat_tokenizer, columns=COLUMNS, max_length=500)
