"""From a DataProto to what scorers of single samples take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tandem.base.errors import ContractError
from tandem.reward.outcome import Sample

if TYPE_CHECKING:
    from tandem.columns.proto import DataProto


def samples_of(data: DataProto) -> list[Sample]:
    """Return one sample per row of ``data``.

    Needs the column ``responses`` and a tokenizer, which makes text of it without special tokens, unless the batch has
    ``answer_text``: then that is the answer. The prompt is
    ``prompt_text`` where that is there, else decoded from ``prompts``, else empty. ``ground_truth``, ``data_source``,
    ``extra_info``, ``truncated`` and ``messages`` are None, empty or False where the batch has no such column.
    """
    if data.tokenizer is None:
        raise ContractError("rewards read answers as text: give the batch a tokenizer, DataProto(..., tokenizer=...)")
    responses = data.ragged("responses").rows()
    if "answer_text" in data.non_tensor_batch:
        texts: Sequence[str] = data.non_tensor_batch["answer_text"]
    else:
        texts = _decode(data.tokenizer, responses)
    if "prompt_text" in data.non_tensor_batch:
        prompts: Sequence[str] = data.non_tensor_batch["prompt_text"]
    elif "prompts" in data.batch:
        prompts = _decode(data.tokenizer, data.ragged("prompts").rows())
    else:
        prompts = [""] * len(data)
    truths, sources, infos = (_field(data, name) for name in ("ground_truth", "data_source", "extra_info"))
    cut = data.dense("truncated").tolist() if "truncated" in data.batch else [False] * len(data)
    lengths, talks = [len(row) for row in responses], _field(data, "messages")
    return [Sample(*row) for row in zip(texts, truths, prompts, sources, infos, lengths, cut, talks, strict=True)]


def _decode(tokenizer: Any, rows: Sequence[Any]) -> list[str]:
    return [tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in rows]


def _field(data: DataProto, name: str) -> list[Any]:
    found: list[Any] = data.non_tensor_batch[name] if name in data.non_tensor_batch else [None] * len(data)
    return found
