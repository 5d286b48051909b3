"""Prompts: one length policy, one order in memory and on disk, bad rows named or counted, held-out rows never drawn."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tandem.base.errors import DataError
from tandem.data.catalog import OnBadRow
from tandem.data.files import open_tables
from tandem.data.length import Overlong
from tandem.data.prompts import PromptColumns, PromptSource
from tandem.data.rows import RowsTable

Write = Callable[[str, Sequence[Mapping[str, object]]], Path]


@pytest.fixture
def make(tokenizer: PreTrainedTokenizerFast) -> Callable[..., PromptSource]:
    """A source of in-memory rows or files, with the given columns and options."""

    def make_source(rows: Any, columns: PromptColumns | None = None, **options: Any) -> PromptSource:
        tables = [RowsTable("rows", rows)] if not isinstance(rows[0], Path) else open_tables(rows)
        settings = {"tokenizer": tokenizer, "max_prompt_length": 16, **options}
        return PromptSource(tables, columns=columns or PromptColumns(), **settings)

    return make_source


def test_columns_become_a_prompt(make: Callable[..., PromptSource], tokenizer: PreTrainedTokenizerFast) -> None:
    row = {"q": "1+1=", "a": "2", "kind": "sum", "id": "r7", "level": 3, "note": None}
    columns = PromptColumns("q", answer_key="a", data_source_key="kind", uid_key="id", extra_keys=("level", "note"))
    (prompt,) = make([row], columns).items
    assert prompt.prompt_ids == tuple(tokenizer("1+1=")["input_ids"])
    assert (prompt.uid, prompt.text, prompt.ground_truth, prompt.data_source) == ("r7", "1+1=", "2", "sum")
    assert prompt.extra_info == {"level": 3, "note": None}
    assert prompt.messages is None


def test_uids_name_the_file_and_the_line(make: Callable[..., PromptSource], write: Write) -> None:
    files = [write("a.jsonl", [{"prompt": "x"}, {"prompt": "y"}]), write("b.parquet", [{"prompt": "z"}])]
    source = make(files)
    assert [(p.uid, p.text, p.data_source) for p in source.items] == [
        ("0:1", "x", "a"),
        ("0:2", "y", "a"),
        ("1:1", "z", "b"),
    ]


def test_a_template_formats_columns(make: Callable[..., PromptSource]) -> None:
    columns = PromptColumns(template="{x:2d}+{y:2d}={{}}\n")
    assert make([{"x": 3, "y": 14}], columns).items[0].text == " 3+14={}\n"
    with pytest.raises(DataError, match="row 1: no column 'y'"):
        make([{"x": 3}], columns)
    with pytest.raises(DataError, match=r"row 1: template .* can't show"):
        make([{"x": "3", "y": 1}], columns)
    for template in ["{x.__class__}", "{0}", "{}", "{x", "no column"]:
        with pytest.raises(DataError, match="template"):
            make([{"x": 3}], PromptColumns(template=template))


def test_text_and_messages_go_through_the_chat_template(
    make: Callable[..., PromptSource], chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    options = {"tokenizer": chat_tokenizer, "max_prompt_length": 99}
    asked = make([{"prompt": "hi"}], PromptColumns(chat=True, system_prompt="be kind"), **options).items[0]
    assert asked.text == "<system>be kind;\n<user>hi;\n<assistant>"
    assert asked.messages == ({"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"})
    turns = [{"role": "user", "content": "a", "name": None}, {"role": "assistant", "content": "b"}]
    turns.append({"role": "user", "content": "c"})
    assert make([{"prompt": turns}], **options).items[0].text == "<user>a;\n<assistant>b;\n<user>c;\n<assistant>"
    with pytest.raises(DataError, match="row 1: the last message is the assistant's"):
        make([{"prompt": turns[:2]}], **options)


def test_a_chat_needs_a_chat_template(make: Callable[..., PromptSource]) -> None:
    with pytest.raises(DataError, match="no chat template"):
        make([{"prompt": "hi"}], PromptColumns(chat=True))
    with pytest.raises(DataError, match="system_prompt is used with chat: true only"):
        make([{"prompt": "hi"}], PromptColumns(system_prompt="be kind"))
    with pytest.raises(DataError, match=r"row 1: .*no chat template"):
        make([{"prompt": [{"role": "user", "content": "hi"}]}])


@pytest.mark.parametrize("streaming", [False, True])
def test_b92_one_length_policy_for_engine_and_trainer(make: Callable[..., PromptSource], streaming: bool) -> None:
    text = "".join(chr(33 + i % 90) for i in range(558))
    rows = [{"prompt": text}, {"prompt": "short"}, {"prompt": text[:512]}]
    options = {"max_prompt_length": 512, "streaming": streaming}
    with pytest.raises(DataError, match=r"row 1: the prompt has 558 tokens.*max_prompt_length = 512"):
        make(rows, on_overlong=Overlong.ERROR, on_bad_row=OnBadRow.DROP, **options)

    dropped = make(rows, on_overlong=Overlong.DROP, **options)
    assert [p.text for p in dropped.items] == ["short", text[:512]]
    assert dropped.counts.dropped == {"overlong": 1}
    assert dropped.counts.cut == 0

    for policy, kept in [(Overlong.LEFT, text[-512:]), (Overlong.RIGHT, text[:512])]:
        source = make(rows, on_overlong=policy, **options)
        assert [p.text for p in source.items] == [kept, "short", text[:512]]
        assert [p.cut for p in source.items] == [True, False, False]
        assert len(source.items[0].prompt_ids) == 512
        assert (source.counts.rows, source.counts.kept, source.counts.cut) == (3, 3, 1)


BAD_ROWS = [
    ({"prompt": 7}, "is 7, neither text nor a list", "not text"),
    ({"prompt": b"x"}, "neither text nor a list", "not text"),
    ({"prompt": None}, "column 'prompt' is null", "null"),
    ({"promt": "x", "answer": "1"}, "no column 'prompt' among promt, answer: did you mean 'promt'", "missing column"),
    ({"prompt": ""}, "the prompt is empty", "empty"),
    ({"prompt": "smile 😀"}, "no token for '😀'", "not encodable"),
    ({"prompt": "half \ud83d"}, "half of a surrogate pair", "not encodable"),
    ({"prompt": []}, "the list of messages is empty", "not encodable"),
    ({"prompt": '[{"role": "user", "content": "x"}]'}, "a list of messages written as text", "not encodable"),
    ({"prompt": ["hi"]}, "message 1 is a str", "not encodable"),
    ({"prompt": [{"from": "human", "value": "hi"}]}, r"message 1 has no role \(it has from, value\)", "not encodable"),
    ({"prompt": "x", "answer": None}, "column 'answer' is null", "null"),
    ({"prompt": "x", "answer": {1, 2}}, "column 'answer' can't be saved as JSON", "not savable"),
    ("text", "a str, not a mapping", "not a row"),
]


@pytest.mark.parametrize(("row", "message", "reason"), BAD_ROWS, ids=[message for _, message, _ in BAD_ROWS])
def test_a_bad_row_is_named_or_counted(
    make: Callable[..., PromptSource], row: object, message: str, reason: str
) -> None:
    rows, columns = (
        [{"prompt": "ok", "answer": "1"}, row, {"prompt": "also", "answer": "2"}],
        PromptColumns(answer_key="answer"),
    )
    with pytest.raises(DataError, match=f"rows, row 2: .*{message}"):
        make(rows, columns)
    source = make(rows, columns, on_bad_row=OnBadRow.DROP)
    assert [p.text for p in source.items] == ["ok", "also"]
    assert source.counts.dropped == {reason: 1}
    assert str(source.counts) == f"3 rows, 2 kept, 1 dropped ({reason})"


def test_a_source_without_a_usable_row_is_refused(make: Callable[..., PromptSource], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no usable row \(2 rows, 0 kept, 2 dropped .*The first.*no column 'prompt'"):
        make([{"question": "x"}, {"question": "y"}], on_bad_row=OnBadRow.DROP)
    blank = tmp_path / "blank.jsonl"
    blank.write_text("\n\n")
    with pytest.raises(DataError, match=r"blank\.jsonl: no rows in it"):
        make([blank], on_bad_row=OnBadRow.DROP)


def test_an_invalid_line_is_named_with_its_number(make: Callable[..., PromptSource], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"\n{"prompt": "c"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, row 2: invalid JSON at column"):
        make([path])
    assert [p.uid for p in make([path], on_bad_row=OnBadRow.DROP).items] == ["0:1", "0:3"]


texts = st.one_of(st.text("abc😀", max_size=24), st.none(), st.integers())


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    prompts=st.lists(texts, min_size=1, max_size=12),
    policy=st.sampled_from([Overlong.DROP, Overlong.LEFT, Overlong.RIGHT]),
    seed=st.integers(0, 3),
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_streaming_gives_the_order_of_memory(
    make: Callable[..., PromptSource],
    write: Write,
    name: str,
    prompts: list[str | int | None],
    policy: Overlong,
    seed: int,
    counts: list[int],
) -> None:
    if name.endswith("parquet"):
        prompts = [None if isinstance(p, int) else p for p in prompts]
    files = [write(name, [{"prompt": "first"}]), write("b" + name, [{"prompt": p} for p in prompts])]
    memory, disk = (
        make(files, on_overlong=policy, on_bad_row=OnBadRow.DROP, seed=seed, streaming=streaming)
        for streaming in (False, True)
    )
    assert disk.counts == memory.counts
    assert [disk.take(count) for count in counts] == [memory.take(count) for count in counts]
    assert disk.refill(1, 2, 3) == memory.refill(1, 2, 3)
    resumed = make(files, on_overlong=policy, on_bad_row=OnBadRow.DROP, seed=seed, streaming=True)
    resumed.load_state_dict(memory.state_dict())
    assert resumed.take(5) == memory.take(5)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_streaming_holds_no_rows(make: Callable[..., PromptSource], write: Write, name: str) -> None:
    path = write(name, [{"prompt": f"{i:04d}", "filling": "x" * 4000} for i in range(1500)])
    tracemalloc.start()
    try:
        source = make([path], streaming=True)
        assert len({prompt.uid for _ in range(3) for prompt in source.take(500)}) == 1500
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1500 * 4000 / 2


def test_data_that_changed_are_refused_on_resume(make: Callable[..., PromptSource]) -> None:
    state = make([{"prompt": "a"}, {"prompt": "b"}]).state_dict()
    make([{"prompt": "a"}, {"prompt": "b"}]).load_state_dict(json.loads(json.dumps(state)))
    with pytest.raises(DataError, match=r"not those of the saved run.*fingerprint"):
        make([{"prompt": "a"}, {"prompt": "c"}]).load_state_dict(state)


def test_held_out_prompts_are_never_drawn(make: Callable[..., PromptSource], write: Write) -> None:
    # The same text is held out whatever row and file it came from, also where it is later cut to one length.
    long = "x" * 30
    held = write("val.jsonl", [{"prompt": "b"}, {"prompt": long + "1"}])
    rows = [{"prompt": text} for text in ["a", "b", "c", "b", long + "1", long + "2"]]
    source = make(rows, held_out=open_tables([held]), on_overlong=Overlong.RIGHT, seed=4, epochs=3)
    assert source.counts.dropped == {"held out": 3}
    drawn = {prompt.text for prompt in source.take(99)} | {source.refill(0, t, 1).text for t in range(99)}
    assert drawn == {"a", "c", "x" * 16}
    with pytest.raises(DataError, match=r"no usable row.*held out"):
        make([{"prompt": "b"}], held_out=open_tables([held]))


def test_uids_can_be_excluded(make: Callable[..., PromptSource]) -> None:
    source = make([{"prompt": "a"}, {"prompt": "b"}], exclude_uids=["0:1"])
    assert [p.text for p in source.items] == ["b"]
    assert source.counts.dropped == {"excluded": 1}
