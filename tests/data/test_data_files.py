"""Tables on disk: one row read alone equals the row of the scan, and what can't be read is named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.base.errors import DataError
from tandem.data.catalog import Catalog, OnBadRow
from tandem.data.files import open_tables
from tandem.data.rows import Row, RowError, RowsTable

Write = Callable[[str, Sequence[Mapping[str, object]]], Path]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
rows = st.lists(st.fixed_dictionaries({"prompt": texts, "n": st.integers(-9, 9)}), min_size=1, max_size=12)


def scanned(path: Path) -> list[Row | RowError]:
    (table,) = open_tables([path])
    return list(table.scan())


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=rows)
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_rows_come_back_alone_and_in_order(write: Write, name: str, rows: list[dict[str, object]]) -> None:
    (table,) = open_tables([write(name, rows)])
    in_order = list(table.scan())
    assert [row.values for row in in_order if isinstance(row, Row)] == rows
    for row in reversed(in_order):
        assert isinstance(row, Row)
        assert table.row(row.number) == row


def test_a_map_with_a_key_twice_is_a_bad_row_and_the_others_are_read(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.int64())
    pq.write_table(
        pa.table({"m": pa.array([[("a", 1)], [("a", 1), ("a", 2)], [("b", 2)]], kind)}), tmp_path / "m.parquet"
    )
    first, twice, last = scanned(tmp_path / "m.parquet")
    assert isinstance(first, Row) and isinstance(last, Row) and (first["m"], last["m"]) == ({"a": 1}, {"b": 2})
    assert isinstance(twice, RowError) and "duplicate key was 'a'" in str(twice) and "row 2" in str(twice)
    (table,) = open_tables([tmp_path / "m.parquet"])
    assert table.row(3) == last
    with pytest.raises(RowError, match="duplicate key was 'a'"):
        table.row(2)


@pytest.mark.parametrize("line", ['{"prompt": "a", "prompt": "b"}', '{"prompt": "a", "tags": [{"x": 1, "x": 1}]}'])
def test_a_key_that_stands_twice_is_a_bad_row_at_any_depth(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{line}\n{{"prompt": "c"}}\n')
    twice, other = scanned(tmp_path / "a.jsonl")
    assert isinstance(twice, RowError) and "stands twice in one object" in str(twice) and "row 1" in str(twice)
    assert isinstance(other, Row) and other["prompt"] == "c"


def test_a_struct_with_a_field_twice_is_a_bad_row(tmp_path: Path) -> None:
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    pq.write_table(pa.table({"s": twice}), tmp_path / "s.parquet")
    (row,) = scanned(tmp_path / "s.parquet")
    assert isinstance(row, RowError) and "duplicate field names" in str(row)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table([pa.array(["x"]), pa.array(["y"])], names=["prompt", "prompt"]), tmp_path / "two.parquet")
    with pytest.raises(DataError, match="two columns are called 'prompt'"):
        open_tables([tmp_path / "two.parquet"])


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_pipe_is_named_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="is a named pipe, and no file"):
        open_tables([tmp_path / name])


def test_a_parquet_file_of_many_batches_and_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "long.parquet"
    pq.write_table(pa.table({"i": range(2000), "tags": [[{"k": i}] for i in range(2000)]}), path, row_group_size=700)
    (table,) = open_tables([path])
    for number in (2000, 1, 700, 701, 256, 257, 1999):
        assert table.row(number).values == {"i": number - 1, "tags": [{"k": number - 1}]}
    assert [row.number for row in table.scan() if isinstance(row, Row)] == list(range(1, 2001))


def test_line_numbers_are_those_of_an_editor(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"a": 1}\r\n\n{"a": "\xf0\x9f\x98\x80 \xe6\xad\xa3"}\n{"a"\n[1]\n{"a": "\xe9"}\n{"a": 2}'
    )
    (table,) = open_tables([path])
    found = list(table.scan())
    assert [(row.number, row.values["a"]) for row in found if isinstance(row, Row)] == [(1, 1), (3, "😀 正"), (7, 2)]
    assert [str(error).removeprefix(f"{path}, ").split(":")[0] for error in found if isinstance(error, RowError)] == [
        "row 4",
        "row 5",
        "row 6",
    ]
    assert [error.reason for error in found if isinstance(error, RowError)] == [
        "invalid json",
        "invalid json",
        "not utf-8",
    ]
    with pytest.raises(RowError, match="row 6: not UTF-8 at byte 8 of the line"):
        table.row(6)


def test_a_utf16_file_says_that_its_encoding_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"a": 1}\n'.encode("utf-16"))
    error = scanned(path)[0]
    assert isinstance(error, RowError)
    assert "save the file as UTF-8" in str(error)


def test_a_json_array_file_says_one_object_per_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"a": 1}, {"a": 2}]))
    error = scanned(path)[0]
    assert isinstance(error, RowError)
    assert "a JSON list, not an object" in str(error)


def test_deeply_nested_json_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("[" * 100_000 + "\n")
    assert isinstance(scanned(path)[0], RowError)


def test_parquet_text_that_is_not_utf8_is_one_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    raw = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"prompt": text}), path)
    (table,) = open_tables([path])
    found = list(table.scan())
    assert [row.values["prompt"] for row in found if isinstance(row, Row)] == ["good", "fine"]
    assert isinstance(found[1], RowError)
    with pytest.raises(RowError, match="row 2: a text column holds bytes that are not UTF-8"):
        table.row(2)


def test_a_missing_file_names_its_neighbours(write: Write) -> None:
    path = write("train.jsonl", [{"a": 1}])
    with pytest.raises(DataError, match=r"trian\.jsonl: no such file.*train\.jsonl"):
        open_tables([path.with_name("trian.jsonl")])
    with pytest.raises(DataError, match=r"is a folder.*train\.jsonl"):
        open_tables([path.parent])
    with pytest.raises(DataError, match="no data file named"):
        open_tables([])


def test_what_is_no_table_is_refused_when_opened(tmp_path: Path) -> None:
    empty, text, csv = tmp_path / "empty.jsonl", tmp_path / "text.parquet", tmp_path / "a.csv"
    empty.touch()
    text.write_text("this is no parquet file, however long it may be")
    csv.write_text("a,b\n")
    for path, message in [
        (empty, "the file is empty"),
        (text, "can't be read as parquet"),
        (csv, "unknown format '.csv'"),
    ]:
        with pytest.raises(DataError, match=f"{path.name}: {message}"):
            open_tables([path])


def test_columns_are_found_by_path_and_missed_by_name() -> None:
    row = next(RowsTable("rows", [{"prompt": "x", "answer": None, "meta": {"truth": 3}, "a.b": 4}]).scan())
    assert isinstance(row, Row)
    assert (row["prompt"], row["meta.truth"], row["a.b"], row.find("answer")) == ("x", 3, 4, None)
    with pytest.raises(RowError, match=r"rows, row 1: no column 'promt' among prompt, answer, meta, a.b: .*'prompt'"):
        row["promt"]
    with pytest.raises(RowError, match="column 'answer' is null"):
        row["answer"]
    with pytest.raises(RowError, match=r"no column 'meta\.other'"):
        row["meta.other"]


def test_an_integer_that_python_does_not_read_is_the_row_s_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "n": ' + "7" * 5000 + '}\n{"prompt": "c"}\n')
    (table,) = open_tables([path])
    rows = list(table.scan())
    assert [getattr(row, "reason", "") for row in rows] == ["", "invalid json", ""]
    assert "a.jsonl, row 2: Exceeds the limit" in str(rows[1]) and "write such a number as text" in str(rows[1])
    with pytest.raises(RowError, match="row 2"):
        table.row(2)


def test_a_row_with_images_is_a_bad_row_however_late_it_comes(tmp_path: Path) -> None:
    @dataclass
    class Text:
        text: object
        cut: bool = False

    path = tmp_path / "rows.jsonl"
    rows: list[dict[str, object]] = [{"prompt": f"{x}"} for x in range(150)]
    rows[140]["images"] = [{"bytes": "x"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables = open_tables([path])

    def encode(table: int, row: Row) -> Text:
        return Text(row["prompt"])

    with pytest.raises(RowError, match=r"row 141: it has the column images.*text alone"):
        Catalog(tables, encode)
    kept = Catalog(tables, encode, on_bad_row=OnBadRow.DROP)
    assert len(kept) == 149 and kept.counts.dropped == {"more than text": 1}
