"""Saved and sent batches come back exactly, whole or not at all, and without pickle."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ContractError, DataError
from tandem.columns import plain_json, storage
from tandem.columns.equality import same_value
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.columns.schema import declare_column

for _dtype in ("bfloat16", "float16", "int8", "bool", "float64"):
    declare_column(f"row_{_dtype}", "row", _dtype, "for tests")
    declare_column(f"ragged_{_dtype}", "ragged", _dtype, "for tests")

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()), max_size=8)
)
keys = st.text(max_size=4) | st.integers() | st.just("$float") | st.none()
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


def sample_batch() -> DataProto:
    batch: dict[str, Any] = {}
    for name in ("bfloat16", "float16", "int8", "bool", "float64"):
        dtype = getattr(torch, name)
        batch[f"row_{name}"] = torch.tensor([1, 0, 3]).to(dtype)
        batch[f"ragged_{name}"] = Ragged.from_lengths(torch.tensor([5, 0, 7]).to(dtype), [0, 3, 0])
    batch["rewards"] = torch.tensor([float("nan"), -0.0, float("inf")])
    batch["responses"] = Ragged.from_lengths(torch.tensor([2**62, -1]), [1, 0, 1])
    others = {
        "prompt_text": ["😀 é\x00\ud83d", "", "正确"],
        "extra_info": [{"a": float("nan"), 3: (1, 2)}, None, {"$float": [True, 1, 1.0]}],
    }
    return DataProto(batch, others, {"step": 7, "none": None, "nan": float("-inf"), "deep": {"x": [1, (2,)]}})


def test_round_trip_is_exact(tmp_path: Path) -> None:
    data = sample_batch()
    data.save(tmp_path / "batch")
    for back in (DataProto.load(tmp_path / "batch", tokenizer="t"), DataProto.from_bytes(data.to_bytes())):
        assert back.equals(data)
        assert back.columns == data.columns
        assert math.copysign(1, back.dense("rewards")[1].item()) == -1
    assert DataProto.load(tmp_path / "batch", tokenizer="t").tokenizer == "t"


@pytest.mark.parametrize("data", [DataProto(), DataProto(meta_info={"a": 1}), sample_batch()[:0]])
def test_empty_batches_round_trip(data: DataProto) -> None:
    back = DataProto.from_bytes(data.to_bytes())
    assert back.equals(data)
    assert len(back) == 0


def test_views_of_one_tensor_are_saved_each(tmp_path: Path) -> None:
    block = torch.arange(12)
    data = DataProto({"group_ids": block[:4], "sample_index": block[::3], "responses": [block[2:5], block[:1]] * 2})
    data.save(tmp_path / "b")
    assert DataProto.load(tmp_path / "b").equals(data)


@given(values)
def test_plain_values_survive_json(value: Any) -> None:
    text = plain_json.dumps(value, "value")
    assert same_value(plain_json.loads(text), value)
    text.encode("ascii")


def test_numpy_scalars_become_python_values() -> None:
    value = {"a": np.float32(0.5), "b": [np.int64(3), np.bool_(True), np.str_("s")]}
    assert same_value(plain_json.loads(plain_json.dumps(value, "value")), {"a": 0.5, "b": [3, True, "s"]})


def test_what_json_cannot_hold_is_named() -> None:
    data = DataProto(non_tensor_batch={"extra_info": [{"a": [object()]}]})
    with pytest.raises(ContractError, match=r"\['extra_info'\]\[0\]\['a'\]\[0\] is a object"):
        data.to_bytes()


def test_a_save_over_an_older_one_leaves_one_tensor_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    sample_batch().save(tmp_path)
    sample_batch()[[2, 0]].save(tmp_path)
    assert DataProto.load(tmp_path).equals(sample_batch()[[2, 0]])
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors", ".txt"]


@pytest.mark.parametrize("step", ["save", "replace"])
def test_a_save_that_dies_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    sample_batch().save(tmp_path)

    def dies(*_: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr(storage.safetensors.torch if step == "save" else storage.os, step, dies)
    with pytest.raises(OSError, match="no space"):
        sample_batch()[:1].save(tmp_path)
    assert DataProto.load(tmp_path).equals(sample_batch())


def test_no_pickle_on_disk_or_wire(tmp_path: Path) -> None:
    sample_batch().save(tmp_path)
    for content in [*(path.read_bytes() for path in tmp_path.iterdir()), sample_batch().to_bytes()]:
        assert not content.startswith((b"\x80", b"PK"))


def test_broken_saves_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.json: no such file"):
        DataProto.load(tmp_path)
    sample_batch().save(tmp_path)
    next(tmp_path.glob("*.safetensors")).write_bytes(b"short")
    with pytest.raises(DataError, match="not a whole save"):
        DataProto.load(tmp_path)
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(DataError, match="not a whole save"):
        DataProto.load(tmp_path)
    (tmp_path / "data.json").write_text('{"format": "other/1"}')
    with pytest.raises(DataError, match="format"):
        DataProto.load(tmp_path)


@pytest.mark.parametrize("cut", [0, 5, 20, -1])
def test_broken_bytes_are_refused(cut: int) -> None:
    with pytest.raises(DataError):
        DataProto.from_bytes(sample_batch().to_bytes()[:cut])
