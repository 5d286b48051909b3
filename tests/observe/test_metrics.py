from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.observe.metrics import MetricLog, RolloutLog, RolloutRecord, StepLog, read_rows, to_json


def strict(text: str) -> object:
    """Parse JSON as other languages do: NaN and Infinity are refused."""

    def refuse(constant: str) -> object:
        raise ValueError(f"not JSON: {constant}")

    return json.loads(text, parse_constant=refuse)


def steps(path: Path) -> list[object]:
    return [row["step"] for row in read_rows(path)]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet=st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(row=st.dictionaries(st.text(min_size=1).filter(lambda key: key != "step"), VALUES, max_size=4))
def test_any_row_is_one_line_of_strict_json(tmp_path_factory: pytest.TempPathFactory, row: dict[str, object]) -> None:
    log = StepLog(tmp_path_factory.mktemp("log") / "rows.jsonl")
    log.append(3, row)
    log.append(4, {})
    log.close()
    first, second, rest = log.path.read_bytes().decode("utf-8").split("\n")
    assert rest == ""
    assert strict(first) == to_json({"step": 3, **row})
    assert strict(second) == {"step": 4}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(2.5, requires_grad=True), 2.5),
        (torch.tensor([1, 2], dtype=torch.int32), [1, 2]),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.array([1.0, math.nan]), [1.0, None]),
        (torch.tensor(math.inf), None),
        (-math.inf, None),
        (Path("runs"), "runs"),
        ({1: (2, 3)}, {"1": [2, 3]}),
    ],
)
def test_numbers_of_arrays_and_tensors_become_plain(value: object, expected: object) -> None:
    assert to_json(value) == expected


def test_a_line_is_on_the_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    log = MetricLog(tmp_path)
    log.append(1, {"reward/mean": 0.5})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5}]


def test_text_of_other_languages_stays_readable(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    log.record(2, [RolloutRecord("正确?\u2028", "🙂 \ud800", None, {"a": 1}, 1)])
    line = (tmp_path / "rollouts.jsonl").read_text("utf-8")
    assert "正确" in line and "🙂" in line
    assert strict(line) == {
        "step": 2,
        "prompt": "正确?\u2028",
        "response": "🙂 \ud800",
        "reward": None,
        "ground_truth": {"a": 1},
        "version": 1,
        "version_max": None,
    }


@given(written=st.lists(st.integers(0, 12)).map(sorted), resumed=st.integers(0, 12), cut=st.integers(0, 30))
def test_a_resumed_log_has_every_step_once(
    tmp_path_factory: pytest.TempPathFactory, written: list[int], resumed: int, cut: int
) -> None:
    """Whatever was cut from the end by the crash, the log goes on after the last whole line up to the resumed step."""
    folder = tmp_path_factory.mktemp("log")
    before = MetricLog(folder)
    for step in written:
        before.append(step, {"reward/mean": step / 2})
    before.close()
    content = before.path.read_bytes()
    before.path.write_bytes(content[: len(content) - cut])
    whole = steps(before.path)

    after = MetricLog(folder, resumed_step=resumed)
    after.append(resumed + 1, {})
    after.close()
    assert steps(after.path) == [step for step in whole if step <= resumed] + [resumed + 1]
    assert all(strict(line) for line in after.path.read_text().splitlines())


def test_a_new_run_sets_the_earlier_file_aside(tmp_path: Path) -> None:
    for run in range(3):
        log = MetricLog(tmp_path)
        log.append(run, {})
        log.close()
    assert steps(tmp_path / "metrics.1.jsonl") == [0]
    assert steps(tmp_path / "metrics.2.jsonl") == [1]
    assert steps(tmp_path / "metrics.jsonl") == [2]


def test_resuming_without_a_file_starts_one(tmp_path: Path) -> None:
    log = MetricLog(tmp_path / "new", resumed_step=5)
    log.append(6, {})
    assert steps(log.path) == [6]
