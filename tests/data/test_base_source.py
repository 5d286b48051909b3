"""What a user's data source may return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tandem.base.errors import DataError
from tandem.data.base_source import BaseDataSource, as_examples
from tandem.data.examples import Example
from tandem.data.length import Overlong

datasets = pytest.importorskip("datasets")
Write = Callable[[str, Sequence[Mapping[str, object]]], Path]


def plain(examples: list[Example]) -> list[tuple[list[int], list[int]]]:
    return [(list(e.input_ids), list(e.loss_mask)) for e in examples]


class SumsDataSource(BaseDataSource):
    """Written as the second seed writes it: no base constructor, ``map`` with ``batched=True``."""

    def __init__(self, train_file: str, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        self.train_file = train_file
        self.tokenizer = tokenizer
        self.folder = folder

    def get_train_dataset(self) -> Any:
        ds = datasets.load_dataset("parquet", data_files=self.train_file, cache_dir=str(self.folder / "cache"))
        return ds.map(lambda x: self._preprocess(x), batched=True)

    def _preprocess(self, examples: Mapping[str, list[str]]) -> Any:
        texts = [f"{q} {a}" for q, a in zip(examples["question"], examples["answer"], strict=True)]
        return self.tokenizer(texts, truncation=True, max_length=8)


def test_the_seeds_data_source_works_as_it_is(
    write: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = write("train.parquet", [{"question": "1+1=", "answer": "2"}, {"question": "10+10=", "answer": "20"}])
    source = SumsDataSource(str(path), tokenizer, tmp_path)
    assert plain(as_examples(source.get_train_dataset())) == [
        (tokenizer("1+1= 2")["input_ids"], [1] * 6),
        (tokenizer("10+10= 2")["input_ids"], [1] * 8),
    ]
    assert source.get_val_dataset() is None
    with pytest.raises(TypeError, match="abstract"):
        BaseDataSource()  # type: ignore[abstract]


ROWS = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}]
EXPECTED = [([5, 6, 7], [0, 1, 1]), ([8, 9], [0, 1])]


class MapStyle(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        if index >= len(ROWS):
            raise IndexError(index)
        return {key: torch.tensor(value) for key, value in ROWS[index].items()}


class Streamed(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


@pytest.mark.parametrize(
    "dataset",
    [
        ROWS,
        tuple(ROWS),
        (row for row in ROWS),
        MapStyle(),
        Streamed(),
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).with_format("torch"),
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}),
        datasets.DatasetDict({"sums": datasets.Dataset.from_list(ROWS)}),
        {"input_ids": [row["input_ids"] for row in ROWS], "labels": [row["labels"] for row in ROWS]},
    ],
    ids=["list", "tuple", "generator", "map", "iterable", "dataset", "tensors", "splits", "one split", "columns"],
)
def test_every_form_of_rows_gives_the_same_examples(dataset: object) -> None:
    assert plain(as_examples(dataset)) == EXPECTED


def test_masks_come_from_the_columns_there_are() -> None:
    padded = {"input_ids": [0, 0, 5, 6, 0], "attention_mask": [0, 0, 1, 1, 0]}
    assert plain(as_examples([padded])) == [([5, 6], [1, 1])]
    labelled = {**padded, "labels": [-100, -100, -100, 6, -100]}
    assert plain(as_examples([labelled])) == [([5, 6], [0, 1])]
    masked = {**padded, "input_ids": [0, 5, 6, 7, 0], "attention_mask": [0, 1, 1, 1, 0], "loss_mask": [0, 0, 1, 0, 0]}
    assert plain(as_examples([masked])) == [([5, 6, 7], [0, 1, 0])]


def test_rows_of_which_nothing_would_be_learned_are_left_out_and_counted() -> None:
    """A loss over no token is 0 / 0. The first token counts as none: nothing foretells it."""
    lost = {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}
    first = {"input_ids": [1, 2], "labels": [1, -100]}
    kept = {"input_ids": [1, 2], "labels": [-100, 2]}
    made = as_examples([lost, kept, first], max_length=2, on_overlong=Overlong.RIGHT)
    assert plain(made) == [([1, 2], [0, 1])]
    assert str(made.counts) == "3 rows, 1 kept, 2 dropped (nothing to learn)"
    with pytest.raises(DataError, match=r"no usable row .*2 dropped \(nothing to learn\)"):
        as_examples([lost, first], max_length=2, on_overlong=Overlong.RIGHT)


def test_rows_of_text_are_tokenised(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"text": "ab"}, {"prompt": "a", "response": "b"}, {"messages": talk}]
    made = as_examples(rows, tokenizer=chat_tokenizer)
    eos = chat_tokenizer.eos_token_id
    a, b = chat_tokenizer("ab")["input_ids"]
    assert plain(made)[:2] == [([a, b, eos], [1, 1, 1]), ([a, b, eos], [0, 1, 1])]
    assert chat_tokenizer.decode([i for i, m in zip(*plain(made)[2], strict=True) if m]) == "a;\n"


def test_the_length_policy_holds_here_too() -> None:
    with pytest.raises(
        DataError, match=r"get_train_dataset\(\), row 1: the example has 3 tokens, more than max_length = 2"
    ):
        as_examples(ROWS, max_length=2)
    assert plain(as_examples(ROWS, max_length=2, on_overlong=Overlong.DROP)) == EXPECTED[1:]
    assert plain(as_examples(ROWS, max_length=2, on_overlong=Overlong.RIGHT)) == [([5, 6], [0, 1]), EXPECTED[1]]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "returned nothing"),
        (7, "returned a int"),
        ("rows.parquet", "returned a str"),
        ({"a": [], "b": []}, "returned the splits a, b, none of them 'train'"),
        ([], "no rows in it"),
        ([7], "row 1: a int, not a mapping"),
        ([{"question": "x"}], "row 1: no column 'input_ids' among question, and no tokenizer"),
        ([{"input_ids": [[1, 2]]}], "row 1: column 'input_ids' must be one flat list of integers"),
        ([{"input_ids": [1, 2], "labels": [2]}], "column 'labels' has 1 entries, input_ids has 2"),
        (
            [{"input_ids": [1, 2], "labels": [2, -100]}],
            r"labels\[0\] = 2 but input_ids\[0\] = 1: labels are .*not shifted",
        ),
        ([{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}], "attention_mask must be one run of ones"),
        ([{"input_ids": [1], "attention_mask": [0]}], "attention_mask must be one run of ones"),
    ],
)
def test_what_is_no_dataset_is_named(dataset: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_examples(dataset)
