"""Data sources that a user writes in Python, and what they may return.

``as_examples`` takes any of: a ``datasets.Dataset``, a ``DatasetDict`` (its split ``train``), a torch dataset, a list,
an iterable; of rows that are tokenised (``input_ids`` with ``loss_mask``, ``labels`` or ``attention_mask``) or text
(``messages``, with ``tools`` if there are any, ``prompt`` and ``response``, or ``text``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tandem.base.errors import DataError
from tandem.data.catalog import Catalog, OnBadRow, RowSkipped
from tandem.data.chat import Endings
from tandem.data.examples import Example, ExampleColumns, encode_example, fit_example
from tandem.data.length import Overlong
from tandem.data.rows import Row, RowsTable, is_indexable
from tandem.models.tokenizer import encode_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLAIN = ExampleColumns()

NOT_TRAINED = -100  # the label that losses ignore, by the convention of torch and transformers


class BaseDataSource(ABC):
    """Rows from Python: subclass it, return rows, hand it to ``trainer.fit``. No base constructor has to be called."""

    @abstractmethod
    def get_train_dataset(self) -> Any:
        """Return the rows to train on, in any of the forms that ``as_examples`` takes."""

    def get_val_dataset(self) -> Any:
        """Return the held-out rows, or ``None``."""
        return None


def as_rows(dataset: object, *, name: str, split: str = "train", keep_nulls: bool = False) -> RowsTable:
    """Return the rows of whatever a data source returned. Raises ``DataError`` if they are none, or it has no such
    split.

    ``keep_nulls``: see ``RowsTable``.
    """
    if dataset is None:
        raise DataError(f"{name} returned nothing: return a dataset or a list of rows")
    if isinstance(dataset, Mapping):
        if "input_ids" in dataset:  # columns, as a tokenizer returns them
            dataset = [dict(zip(dataset, row, strict=True)) for row in zip(*dataset.values(), strict=True)]
        elif split in dataset:
            dataset = dataset[split]
        elif len(dataset) == 1:
            (dataset,) = dataset.values()
        else:
            raise DataError(
                f"{name} returned the splits {', '.join(map(str, dataset))}, none of them {split!r}: return one"
            )
    if not isinstance(dataset, str | bytes):
        if is_indexable(dataset):
            return RowsTable(name, dataset, keep_nulls=keep_nulls)
        if isinstance(dataset, Iterable):
            return RowsTable(name, list(dataset), keep_nulls=keep_nulls)
    raise DataError(f"{name} returned a {type(dataset).__name__}: return a dataset or a list of rows")


def as_examples(
    dataset: object,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_length: int | None = None,
    on_overlong: Overlong = Overlong.ERROR,
    on_bad_row: OnBadRow = OnBadRow.ERROR,
    columns: ExampleColumns = _PLAIN,
    name: str = "get_train_dataset()",
    split: str = "train",
) -> Catalog[Example]:
    """Return every row of ``dataset`` as an ``Example``, in order; rows over ``max_length`` as ``on_overlong`` says.

    A finite iterable is read to its end. ``tokenizer`` and ``columns`` are for rows of text. Rows of which no token
    would be learned are left out and counted. Raises ``DataError`` with the row.
    """
    endings = Endings()

    def encode(table: int, row: Row) -> Example:
        ids, mask = _encode(row, tokenizer, columns)
        if tokenizer is not None and "input_ids" not in row.values and (columns.chat or _talks(row, columns)):
            endings.add(tokenizer, ids, mask)
        limit, where = len(ids) if max_length is None else max_length, f"{name}, row {row.number}"
        example = fit_example(ids, mask, max_length=limit, on_overlong=on_overlong, where=where, uid=where)
        if not any(example.loss_mask[1:]):
            raise RowSkipped("nothing to learn")
        return example

    catalog = Catalog([as_rows(dataset, name=name, split=split)], encode, on_bad_row=on_bad_row)
    if tokenizer is not None:
        endings.warn(tokenizer)
    return catalog


def _encode(
    row: Row, tokenizer: PreTrainedTokenizerBase | None, columns: ExampleColumns
) -> tuple[Sequence[int], Sequence[int]]:
    if "input_ids" in row.values:
        return _tokenised(row)
    if tokenizer is None:
        raise row.bad(
            "not tokenised", f"no column 'input_ids' among {', '.join(map(str, row.values))}, and no tokenizer"
        )
    if _talks(row, columns):
        messages_key = _messages_key(columns)
        tools = "tools" if columns.tools_key is None and "tools" in row.values else columns.tools_key
        return encode_example(tokenizer, replace(columns, messages_key=messages_key, tools_key=tools), row)
    if columns.prompt_key in row.values and columns.response_key in row.values:
        return encode_example(tokenizer, replace(columns, messages_key=None), row)
    text = row["text"]
    if not isinstance(text, str):
        raise row.bad("not text", f"column 'text' is {text!r}, not text")
    try:
        ids = encode_plain(tokenizer, text)
    except DataError as error:
        raise row.bad("not encodable", str(error)) from error
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    return ids, [1] * len(ids)


def _messages_key(columns: ExampleColumns) -> str:
    return "messages" if columns.messages_key is None else columns.messages_key


def _talks(row: Row, columns: ExampleColumns) -> bool:
    """Return whether the row is a conversation."""
    return _messages_key(columns) in row.values


def _tokenised(row: Row) -> tuple[Sequence[int], Sequence[int]]:
    """Return the ids and mask of a row that has ``input_ids``; padding, which ``attention_mask`` shows, is
    taken off.
    """
    ids = _integers(row, "input_ids")
    seen = _integers(row, "attention_mask", len(ids)) if "attention_mask" in row.values else [1] * len(ids)
    if "loss_mask" in row.values:
        mask = _integers(row, "loss_mask", len(ids))
    elif "labels" in row.values:
        labels = _integers(row, "labels", len(ids))
        shifted = [i for i, label in enumerate(labels) if label not in (NOT_TRAINED, ids[i])]
        if shifted:
            raise row.bad(
                "wrong labels",
                f"labels[{shifted[0]}] = {labels[shifted[0]]} but input_ids[{shifted[0]}] = {ids[shifted[0]]}: "
                f"labels are the input_ids, not shifted, with {NOT_TRAINED} where nothing is learned",
            )
        mask = [int(label != NOT_TRAINED) for label in labels]
    else:
        mask = seen
    begin, end = (seen.index(1), len(seen) - seen[::-1].index(1)) if 1 in seen else (0, 0)
    if not all(seen[begin:end]) or begin == end:
        raise row.bad("wrong mask", "attention_mask must be one run of ones, with padding before or after it only")
    return ids[begin:end], [int(bool(m)) for m in mask[begin:end]]


def _integers(row: Row, key: str, length: int | None = None) -> list[int]:
    value: Any = row[key]
    value = value.tolist() if hasattr(value, "tolist") else list(value)
    if not all(isinstance(i, int) for i in value):
        raise row.bad("not integers", f"column {key!r} must be one flat list of integers, not {str(value)[:60]}")
    if length is not None and len(value) != length:
        raise row.bad("unequal lengths", f"column {key!r} has {len(value)} entries, input_ids has {length}")
    return [int(i) for i in value]
