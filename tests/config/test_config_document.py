"""Reading YAML: 1.2 scalars, duplicate keys, errors that name the place."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tandem.config.document import DocumentError, parse_yaml, read_document


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-3.", -3.0),
        ("010", 10),
        ("0o10", 8),
        ("0xff", 255),
        ("true", True),
        ("FALSE", False),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("~", None),
        ("", None),
        ("'2'", "2"),
        ("[1, a, 2.0]", [1, "a", 2.0]),
        ('{"actor": [1, 4]}', {"actor": [1, 4]}),
        ("{'a:b': , c:d: 1, \"e\":2}", {"a:b": None, "c:d": 1, "e": 2}),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = parse_yaml(text, "value")
    assert found == value
    assert type(found) is type(value)


def test_special_floats() -> None:
    assert parse_yaml(".inf", "value") == math.inf
    assert parse_yaml("-.INF", "value") == -math.inf
    assert math.isnan(parse_yaml(".nan", "value"))


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "line 4", "'c' stands twice (first in line 3)"),
        ("a: 1\na: 1\n", "line 2", "'a' stands twice"),
        ("a: [1\nb: 2\n", "line 2", "not valid YAML"),
        ("a:\n\tb: 1\n", "line 2", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "line 2", "not valid YAML"),
        (
            "a: {type:ppo_clip}\n",
            "line 1",
            "'type:ppo_clip' is one word: write a space behind the colon, {type: ppo_clip}",
        ),
        ("a: {x: 1, y:2}\n", "line 1", "'y:2' is one word"),
        ("a: *nowhere\n", "line 1", "undefined alias"),
        ("a: !!python/object/apply:os.getcwd []\n", "line 1", "could not determine a constructor"),
    ],
)
def test_a_syntax_error_names_file_and_line(tmp_path: Path, text: str, place: str, reason: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(DocumentError) as caught:
        read_document(file)
    problem = caught.value.problem
    assert str(file) in problem.key
    assert place in problem.key
    assert reason in problem.reason


def test_a_merged_mapping_may_overwrite_a_key() -> None:
    assert parse_yaml("base: &b {lr: 1, n: 2}\nmine:\n  <<: *b\n  lr: 3\n", "x")["mine"] == {"lr": 3, "n": 2}


@pytest.mark.parametrize("content", [b"\xff\xfe\x00a", b"a: \x00", b"- 1\n- 2\n", b"just text", b"n: " + b"9" * 5000])
def test_what_is_no_mapping_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(DocumentError) as caught:
        read_document(file)
    assert str(file) in caught.value.problem.key
    assert caught.value.problem.remedy


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("# nothing yet\n")
    assert read_document(file) == {}


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(DocumentError) as caught:
            read_document(path)
        assert caught.value.problem.value == str(path)
