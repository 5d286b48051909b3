"""DataProto: choosing, joining and checking."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.columns.schema import declare_column

declare_column("x", "row", "int64", "number of the row, for tests")
declare_column("y", "row", "int64", "another number, for tests")


def numbered(size: int, meta: dict[str, Any] | None = None) -> DataProto:
    """Rows that can be told apart in every column: row i has i response tokens."""
    return DataProto.from_dict(
        {
            "x": torch.arange(size),
            "responses": Ragged.from_lengths(
                torch.cat([torch.full((i,), i) for i in range(size)] or [torch.zeros(0, dtype=torch.int64)]),
                list(range(size)),
            ),
        },
        {"uid": [f"r{i}" for i in range(size)]},
        meta,
    )


def rows(data: DataProto) -> list[int]:
    """The row numbers, after checking that all columns moved together."""
    numbers: list[int] = data.dense("x").tolist()
    assert data.non_tensor_batch["uid"] == [f"r{i}" for i in numbers]
    assert [row.tolist() for row in data.ragged("responses")] == [[i] * i for i in numbers]
    return numbers


class WordTokenizer:
    words = ("no", "正确", "yes")

    def decode(self, ids: torch.Tensor) -> str:
        assert ids.ndim == 1
        return " ".join(self.words[i] for i in ids.tolist())


class KeywordRewardManager:
    """As the programming-model article prints it."""

    def __init__(self, keyword: str = "正确") -> None:
        self.keyword = keyword

    def __call__(self, data: DataProto) -> torch.Tensor:
        rewards = torch.zeros(len(data), dtype=torch.float32)
        for i, item in enumerate(data):
            response_str = item.tokenizer.decode(item.batch["responses"])
            rewards[i] = 1.0 if self.keyword in response_str else 0.0
        return rewards


def test_the_keyword_reward_of_the_article_runs() -> None:
    responses = [torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([], dtype=torch.int64), torch.tensor([1])]
    data = DataProto({"responses": responses}, tokenizer=WordTokenizer())
    assert KeywordRewardManager()(data).tolist() == [1, 0, 0, 1]
    assert KeywordRewardManager()(data[[1, 3]]).tolist() == [0, 1]


def test_items_have_unpadded_rows_and_metadata() -> None:
    data = numbered(4, {"step": 3})
    for i, item in enumerate([data[j] for j in range(4)] + list(data)):
        assert item.batch["responses"].tolist() == [i % 4] * (i % 4)
        assert item.batch["x"].item() == i % 4
        assert item.non_tensor_batch == {"uid": f"r{i % 4}"}
        assert item.meta_info == {"step": 3}
    assert data[np.int64(2)].non_tensor_batch["uid"] == data[torch.tensor(-2)].non_tensor_batch["uid"] == "r2"
    with pytest.raises(IndexError):
        data[4]


@given(st.integers(0, 9), st.data())
def test_rows_are_chosen_alike_in_every_column(size: int, draw: st.DataObject) -> None:
    data, numbers = numbered(size, {"a": 1}), list(range(size))
    cut = draw.draw(st.slices(size)) if size else slice(None)
    assert rows(data[cut]) == numbers[cut]
    order = draw.draw(st.permutations(numbers))
    assert rows(data.reorder(order)) == order
    assert data.reorder(order).meta_info == {"a": 1}
    chosen = draw.draw(st.lists(st.sampled_from(numbers), max_size=12)) if size else []
    assert rows(data[chosen]) == rows(data[torch.tensor(chosen, dtype=torch.int64)]) == chosen
    mask = torch.tensor(draw.draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=torch.bool)
    assert rows(data[mask]) == rows(data[mask.numpy()]) == mask.nonzero().squeeze(1).tolist()


@given(st.integers(1, 9), st.integers(1, 9))
def test_parts_join_to_the_whole(size: int, step: int) -> None:
    data = numbered(size, {"a": 1, "metrics": {"l": 1.0}})
    parts = data.split(step)
    assert [len(part) for part in parts[:-1]] == [step] * (len(parts) - 1)
    assert rows(DataProto.concat(parts)) == list(range(size))
    padded, pad_size = data.pad_to_divisor(step)
    assert len(padded) % step == 0
    assert rows(padded) == [i % size for i in range(size + pad_size)]
    assert padded.unpad(pad_size).equals(data)
    assert [row for part in padded.chunk(step) for row in rows(part)] == rows(padded)


@given(st.integers(0, 5), st.integers(1, 4))
def test_repeat(size: int, times: int) -> None:
    data, numbers = numbered(size), list(range(size))
    assert rows(data.repeat(times)) == [i for i in numbers for _ in range(times)]
    assert rows(data.repeat(times, interleave=False)) == numbers * times


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 4))
def test_concat_in_two_steps_is_concat_at_once(sizes: list[int], cut: int) -> None:
    parts = [numbered(size, {"a": 1, "metrics": {"l": float(i), "k": [i]}}) for i, size in enumerate(sizes)]
    at_once = DataProto.concat(parts)
    in_steps = DataProto.concat([DataProto.concat(part) for part in (parts[:cut], parts[cut:]) if part])
    assert at_once.equals(in_steps)
    assert at_once.meta_info["metrics"]["l"] == [float(i) for i in range(len(sizes))]


def test_concat_of_conflicting_meta_or_columns_is_refused() -> None:
    with pytest.raises(ContractError, match=r"meta_info\['a'\] is 1 on one side and 2"):
        DataProto.concat([numbered(2, {"a": 1}), numbered(2, {"a": 2})])
    with pytest.raises(ContractError, match="'responses' is not in every part"):
        DataProto.concat([numbered(2), numbered(2).select("x", "uid")])
    with pytest.raises(ContractError, match="nothing to join"):
        DataProto.concat([])


def test_chunk_names_the_sizes() -> None:
    with pytest.raises(ContractError, match=r"5 samples don't divide into 2 equal parts"):
        numbered(5).chunk(2)


def test_union() -> None:
    left = DataProto({"x": torch.tensor([1, 2])}, {"uid": ["a", "b"]}, {"a": float("nan")})
    right = DataProto({"x": torch.tensor([1, 2]), "y": torch.tensor([3, 4])}, meta_info={"a": float("nan"), "b": None})
    both = left.union(right)
    assert both.columns == ["x", "y", "uid"]
    assert set(both.meta_info) == {"a", "b"}
    assert DataProto(meta_info={"c": 1}).union(left).columns == ["x", "uid"]
    for other, named in (
        (DataProto({"x": torch.tensor([1, 3])}), "'x'"),
        (DataProto(non_tensor_batch={"uid": ["a", "c"]}), "'uid'"),
        (DataProto({"y": torch.tensor([1, 2, 3])}), "'y'"),
        (DataProto(meta_info={"a": 0.0}), "'a'"),
    ):
        with pytest.raises(ContractError, match=named):
            left.union(other)


def test_select_pop_rename() -> None:
    data = numbered(3, {"a": 1})
    assert data.select("uid", "x").columns == ["x", "uid"]
    taken = data.pop("responses", "uid")
    assert taken.columns == ["responses", "uid"]
    assert data.columns == ["x"]
    assert data.rename({"x": "y"}).columns == ["y"]
    assert data.union(taken).equals(numbered(3, {"a": 1}))
    with pytest.raises(ContractError, match="'responses' is not in this batch; it has"):
        data.select("responses")
    with pytest.raises(ContractError, match="'y' would be there twice"):
        DataProto({"x": torch.arange(2), "y": torch.arange(2)}).rename({"x": "y"})


def test_padded_columns() -> None:
    data = numbered(3)
    assert data.padded("responses", -1).tolist() == [[-1, -1], [1, -1], [2, 2]]
    assert data.padded("responses", left=True, width=3).tolist() == [[0, 0, 0], [0, 0, 1], [0, 2, 2]]
    with pytest.raises(ContractError, match="'x': expected ragged rows"):
        data.padded("x")
    with pytest.raises(ContractError, match="'responses': expected a tensor"):
        data.dense("responses")


def test_assignment_is_checked() -> None:
    data = numbered(3)
    data.batch["rewards"] = torch.zeros(3)
    data.batch["advantages"] = data.ragged("responses").like(torch.zeros(3))
    wrong: list[tuple[str, Any, str]] = [
        ("rewards", torch.zeros(2), "'rewards': expected 3 rows"),
        ("rewards", torch.zeros(3, dtype=torch.float64), "'rewards': expected dtype float32, got float64"),
        ("reward", torch.zeros(3), "'reward' is not declared: did you mean 'rewards'"),
        ("responses", torch.zeros(3, 2, dtype=torch.int64), "'responses': expected ragged rows"),
        ("returns", [torch.zeros(1)] * 3, "'returns': row 0 has 1 entries, but that of 'responses' has 0"),
        ("rewards", [0.0, 1.0, 0.0], "'rewards': expected a tensor"),
    ]
    for name, value, message in wrong:
        with pytest.raises(ContractError, match=message):
            data.batch[name] = value
    with pytest.raises(ContractError, match=r"'rewards': expected a tensor .* got a Python list"):
        data.non_tensor_batch["rewards"] = [1.0, 2.0, 3.0]
    with pytest.raises(ContractError, match="'uid': expected 3 rows"):
        data.non_tensor_batch["uid"] = ["a"]
    with pytest.raises(ContractError, match="'uid': expected a list"):
        data.non_tensor_batch["uid"] = "abc"
    assert data.batch["rewards"].shape == (3,)


def test_prompts_and_responses_have_lengths_of_their_own() -> None:
    prompts = Ragged.from_lengths(torch.arange(5), [2, 3])
    data = DataProto({"prompts": prompts, "responses": Ragged.from_lengths(torch.arange(3), [3, 0])})
    assert len(data) == 2


def test_b32_stored_ids_equal_sampled_ids() -> None:
    """Ids that no tokenizer would give for the text survive every way through a batch."""
    he, llo, hello = 11, 12, 13

    class Merging:
        def decode(self, ids: torch.Tensor) -> str:
            return "".join({he: "he", llo: "llo", hello: "hello"}[i] for i in ids.tolist())

    sampled = [torch.tensor([he, llo]), torch.tensor([hello]), torch.tensor([], dtype=torch.int64)]
    data = DataProto({"responses": sampled}, tokenizer=Merging())
    assert [item.tokenizer.decode(item.batch["responses"]) for item in data] == ["hello", "hello", ""]
    moved = DataProto.from_bytes(data.repeat(2)[[3, 1, 5, 4]].to_bytes()).union(DataProto(meta_info={"turn": 2}))
    kept = DataProto.concat([moved[[1]], moved[[2]], moved[[3]]])
    assert [row.tolist() for row in kept.ragged("responses")] == [[he, llo], [], []]
    assert moved.padded("responses", -1).tolist() == [[hello, -1], [he, llo], [-1, -1], [-1, -1]]
