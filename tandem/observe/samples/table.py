"""Samples as rows of an Arrow table: what a person asks of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]

from tandem.base.hidden import hide, hide_in
from tandem.base.lazy import LazyModule
from tandem.observe.metrics import to_json
from tandem.observe.samples.parts import Kind

if TYPE_CHECKING:
    import torch

    from tandem.columns.proto import DataProto
    from tandem.columns.ragged import Ragged
else:
    torch = LazyModule("torch")

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),  # of the line in metrics.jsonl
        ("kind", pa.string()),  # train, eval
        ("group", pa.int32()),  # the prompt's place in the step
        ("sample", pa.int32()),  # the answer's place in its group
        ("uid", pa.string()),
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        (
            "inserted",
            pa.list_(pa.int32()),
        ),  # of an episode: where text stands in it that was not sampled, start, end ...
        ("ground_truth", pa.string()),  # text as it is, anything else as JSON
        ("extra_info", pa.string()),  # JSON
        ("reward", pa.float32()),  # null where scoring failed
        ("counted", pa.bool_()),  # False: in no statistic and no loss
        ("failure", pa.string()),  # why there is no reward
        (
            "scores",
            pa.map_(pa.string(), pa.float64()),
        ),  # further numbers of the scorer, an episode's reward of turn 1 ...
        ("notes", pa.map_(pa.string(), pa.string())),  # its words, such as a judge's reply
        ("advantage", pa.float32()),  # mean over the trained tokens
        ("trained_tokens", pa.int32()),
        ("length", pa.int32()),  # tokens
        ("prompt_length", pa.int32()),
        ("finish", pa.string()),  # stop, length
        ("version", pa.int32()),  # the oldest weights that made a token of it
        ("version_max", pa.int32()),
        ("lag", pa.int32()),
    ]
)
"""Columns of every part."""

TOKEN_SCHEMA = pa.schema(
    [
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.string())),  # the text of each
        ("sampled", pa.list_(pa.bool_())),  # false for what a tool or an environment said
        ("logprobs", pa.list_(pa.float32())),  # of the distribution sampled from
        ("old_logprobs", pa.list_(pa.float32())),  # of the trainer, where they were computed
    ]
)
"""Columns where tokens are asked for."""

IMAGE_SCHEMA = pa.schema([("images", pa.list_(pa.string()))])
"""A column where prompts show images: small ones, as data URLs."""

IMAGES = "images"
"""The column of a batch that they come from."""

_SHOWN = (
    IMAGES,
    *("group_ids", "sample_index", "uid", "data_source", "prompt_text", "ground_truth", "extra_info"),
    *("prompts", "responses", "truncated", "rewards", "reward_valid", "scoring", "episode"),
    *("response_mask", "loss_mask", "advantages", "token_versions"),
)
_SHOWN_TOKENS = ("rollout_logprobs", "old_logprobs")


def shown_columns(tokens: bool) -> tuple[str, ...]:
    """Return the columns of a batch that ``sample_table`` reads, where they are there."""
    return _SHOWN + _SHOWN_TOKENS if tokens else _SHOWN


def sample_table(batch: DataProto, step: int, kind: Kind, *, tokens: bool = False) -> pa.Table:
    """Return the B samples of ``batch``; ``step`` counts from 1, so that its lag is ``step - 1`` minus a sample's
    version.

    An evaluation has no lag, no advantages and trains nothing. ``tokens`` adds those of ``TOKEN_SCHEMA``.
    """
    columns = _identity(batch, step, kind) | _texts(batch) | _scoring(batch) | _training(batch, step, kind)
    table = pa.table(columns, schema=SCHEMA)
    if IMAGES in batch.columns:
        urls = [[] if images is None else images.urls for images in batch.non_tensor_batch[IMAGES]]
        table = table.append_column(IMAGE_SCHEMA.field(0), pa.array(urls, IMAGE_SCHEMA.field(0).type))
    if tokens:
        for field, values in zip(TOKEN_SCHEMA, _tokens(batch), strict=True):
            table = table.append_column(field, pa.array(values, field.type))
    return table


def _identity(batch: DataProto, step: int, kind: Kind) -> dict[str, list[Any]]:
    count = len(batch)
    return {
        "step": [step] * count,
        "kind": [kind] * count,
        "group": batch.dense("group_ids").tolist(),
        "sample": batch.dense("sample_index").tolist(),
        "uid": [str(uid) for uid in batch.non_tensor_batch["uid"]],
        "data_source": _once_each(_text, batch.non_tensor_batch["data_source"]),
    }


def _texts(batch: DataProto) -> dict[str, list[Any]]:
    fields = batch.non_tensor_batch
    rows, masks = _rows(batch.ragged("responses")), _rows(batch.ragged("response_mask"))
    answers = [_text(batch.tokenizer.decode(row)) for row in rows]
    return {
        "prompt": _once_each(_text, fields["prompt_text"]),
        "response": answers,
        "inserted": [
            _inserted(batch.tokenizer, ids, mask, len(answer))
            for ids, mask, answer in zip(rows, masks, answers, strict=True)
        ],
        "ground_truth": _once_each(_text, fields["ground_truth"]),
        "extra_info": _once_each(lambda value: _text(hide_in(to_json(value))), fields["extra_info"]),
        "length": batch.ragged("responses").lengths.tolist(),
        "prompt_length": batch.ragged("prompts").lengths.tolist(),
        "finish": ["length" if cut else "stop" for cut in batch.dense("truncated").tolist()],
    }


def _inserted(tokenizer: Any, ids: list[int], mask: list[bool], length: int) -> list[int]:
    """Return where the text of ``ids`` that was not sampled starts and ends, in characters, stretch by stretch."""
    if all(mask):
        return []
    others = [False, *(not sampled for sampled in mask), False]
    bounds = [place for place in range(len(mask) + 1) if others[place] != others[place + 1]]
    return [min(length, len(_text(tokenizer.decode(ids[:bound])))) for bound in bounds]


def _scoring(batch: DataProto) -> dict[str, list[Any]]:
    rewards = batch.dense("rewards")
    said = batch.non_tensor_batch["scoring"]
    played = batch.non_tensor_batch["episode"] if "episode" in batch.columns else [{}] * len(said)
    turns = [one.get("turn_rewards", ()) for one in played]
    return {
        "reward": _or_null(rewards, rewards.isfinite()),
        "counted": batch.dense("reward_valid").tolist(),
        "failure": [_text(hide(row["failure"])) if row["failure"] else None for row in said],
        "scores": [
            [*row["metrics"].items(), *((f"turn {turn}", reward) for turn, reward in enumerate(given, 1))]
            for row, given in zip(said, turns, strict=True)
        ],
        "notes": [[(name, _text(hide(text))) for name, text in row["notes"].items()] for row in said],
    }


def _training(batch: DataProto, step: int, kind: Kind) -> dict[str, list[Any]]:
    responses = batch.ragged("responses")
    owner, count = torch.repeat_interleave(responses.lengths), len(batch)
    versions = batch.ragged("token_versions").values.long()
    oldest, newest = (_extreme(versions, owner, count, way) for way in ("amin", "amax"))
    made = responses.lengths > 0
    trained, advantages = torch.zeros(count), torch.zeros(count)
    if kind == "train":
        mask = batch.ragged("loss_mask" if "loss_mask" in batch.columns else "response_mask").values.float()
        trained.index_add_(0, owner, mask)
        if "advantages" in batch.columns:
            advantages.index_add_(0, owner, batch.ragged("advantages").values.float() * mask)
    has_advantage = (trained > 0) & ("advantages" in batch.columns)
    return {
        "advantage": _or_null(advantages / trained.clamp(min=1), has_advantage),
        "trained_tokens": trained.int().tolist(),
        "version": _or_null(oldest, made),
        "version_max": _or_null(newest, made),
        "lag": _or_null(step - 1 - oldest, made & (kind == "train")),
    }


def _extreme(values: torch.Tensor, owner: torch.Tensor, count: int, way: str) -> torch.Tensor:
    """Return the least or greatest of the values (N,) of each of ``count`` owners; 0 for one without any."""
    return torch.zeros(count, dtype=values.dtype).scatter_reduce_(0, owner, values, way, include_self=False)


def _tokens(batch: DataProto) -> list[list[Any]]:
    """Return the columns of ``TOKEN_SCHEMA`` in its order."""
    responses, texts = batch.ragged("responses"), {}
    for token in responses.values.unique().tolist():
        texts[token] = _token_text(batch.tokenizer, token)
    old = _rows(batch.ragged("old_logprobs")) if "old_logprobs" in batch.columns else None
    return [
        _rows(batch.ragged("prompts")),
        _rows(responses),
        [[texts[token] for token in row] for row in _rows(responses)],
        _rows(batch.ragged("response_mask")),
        _rows(batch.ragged("rollout_logprobs")),
        [None] * len(batch) if old is None else old,
    ]


def _rows(column: Ragged) -> list[list[Any]]:
    values, ends = column.values.tolist(), column.offsets.tolist()
    return [values[begin:end] for begin, end in pairwise(ends)]


def _once_each(as_text: Callable[[Any], str], values: Iterable[Any]) -> list[str]:
    """Return each value as text. Samples of a group share the objects of their row: each is put into words once."""
    texts: dict[int, str] = {}
    return [texts[id(value)] if id(value) in texts else texts.setdefault(id(value), as_text(value)) for value in values]


def _token_text(tokenizer: Any, token: int) -> str:
    """Return a token's own text; behind another one, since some tokenizers take the space before a first word away."""
    alone, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
    return _text(twice[len(alone) :] if twice.startswith(alone) else alone)


def _text(value: Any) -> str:
    """Return text as UTF-8 can hold it; what is no text as JSON, nothing as nothing."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(to_json(value), ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _or_null(values: torch.Tensor, there: torch.Tensor) -> list[Any]:
    return [value if keep else None for value, keep in zip(values.tolist(), there.tolist(), strict=True)]
