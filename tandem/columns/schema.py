"""The declared columns of a batch: how each is stored, of which dtype, and what it means. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tandem.base.errors import ContractError


class Kind(StrEnum):
    """How a column of B samples is stored."""

    RAGGED = "ragged"  # one row of its own length per sample: values (N, ...) + offsets (B + 1,)
    ROW = "row"  # a tensor (B, ...)
    OBJECT = "object"  # a Python list of length B


@dataclass(frozen=True)
class ColumnSpec:
    """What is declared of a column: its name, how it is stored, and what it means.

    ``dtype`` is the torch name (``"float32"``), or the Python type in words for an object column. Columns with the same
    ``aligned_with`` (and that column itself) have rows of equal lengths, sample by sample.
    """

    name: str
    kind: Kind
    dtype: str
    description: str
    aligned_with: str | None = None


class Found(NamedTuple):
    """What is really there under a column's name."""

    kind: Kind
    dtype: str


_declared: dict[str, ColumnSpec] = {}


def declare_column(
    name: str, kind: Kind | str, dtype: str, description: str, *, aligned_with: str | None = None
) -> ColumnSpec:
    """Make ``name`` a known column; declaring it twice in the same way is harmless.

    Raises ``ContractError`` if the name is no identifier (a column is a parameter of a function somewhere), if it is
    declared already in another way, or if ``aligned_with`` is not a ragged column.

    >>> declare_column("tools_called", "row", "int64", "number of tools that a sample has called").dtype
    'int64'
    """
    if not name.isidentifier():
        raise ContractError(f"column {name!r}: not an identifier. Columns are named like parameters: 'tool_rewards'")
    spec = ColumnSpec(name, Kind(kind), dtype, description, aligned_with)
    if aligned_with is not None and not (spec.kind is _spec(aligned_with).kind is Kind.RAGGED):
        raise ContractError(f"column {name!r}: aligned_with={aligned_with!r} needs both columns to be ragged")
    known = _declared.setdefault(name, spec)
    if known != spec:
        raise ContractError(
            f"column {name!r}: declared already as {known.kind} of {known.dtype} ({known.description}), "
            f"now as {spec.kind} of {spec.dtype} ({spec.description}). Choose another name"
        )
    return known


def declared_columns() -> dict[str, ColumnSpec]:
    """Return all declared columns by name, in order of declaration."""
    return dict(_declared)


def _spec(name: str) -> ColumnSpec:
    if name not in _declared:
        near = difflib.get_close_matches(name, _declared, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "is it misspelt?"
        raise ContractError(
            f"column {name!r} is not declared: {hint} A new column is made known by "
            f"tandem.columns.schema.declare_column({name!r}, kind, dtype, description)"
        )
    return _declared[name]


def alignment(name: str) -> str:
    """Return the column whose row lengths the ragged column ``name`` shares; itself where none was declared."""
    return _spec(name).aligned_with or name


def check(columns: Mapping[str, Found]) -> None:
    """Raise ``ContractError``, naming column, expected and got, unless each tensor column is as it was declared."""
    for name, found in columns.items():
        spec = _spec(name)
        if spec.kind is not found.kind:
            raise ContractError(f"column {name!r}: expected {_words(spec.kind)}, got {_words(found.kind)}")
        if spec.kind is not Kind.OBJECT and spec.dtype != found.dtype:
            raise ContractError(f"column {name!r}: expected dtype {spec.dtype}, got {found.dtype}")


def check_object(name: str) -> None:
    """Raise ``ContractError`` if ``name`` is a tensor column. Object columns are the user's: none need be declared."""
    spec = _declared.get(name)
    if spec is not None and spec.kind is not Kind.OBJECT:
        raise ContractError(
            f"column {name!r}: expected {_words(spec.kind)}, {spec.dtype}, in .batch; got a Python list"
        )


def _words(kind: Kind) -> str:
    return {
        Kind.RAGGED: "ragged rows (a Ragged; from padded data: Ragged.from_padded(x, mask))",
        Kind.ROW: "a tensor with one entry per sample",
        Kind.OBJECT: "a Python list (in .non_tensor_batch)",
    }[kind]


_RESPONSE_COLUMNS = (
    ("responses", "int64", "sampled token ids, exactly as sampled: text is never re-tokenised"),
    ("response_mask", "bool", "True where the token is trained; False on tool output and other inserted tokens"),
    ("restarts", "bool", "True where the context begins anew: nothing before it is seen from there on"),
    ("rollout_logprobs", "float32", "log-prob of each token under the distribution it was sampled from (behaviour)"),
    ("token_versions", "int32", "weights version that produced each token"),
    ("old_logprobs", "float32", "log-prob under the trainer's weights at the start of the step (proximal)"),
    ("ref_logprobs", "float32", "log-prob under the reference weights"),
    ("teacher_logprobs", "float32", "log-prob under the sample's teacher"),
    ("teacher_topk_logprobs", "float32", "log-probs of the teacher's k likeliest tokens in each place, (N, k)"),
    ("teacher_topk_ids", "int32", "ids of the teacher's k likeliest tokens in each place, (N, k)"),
    ("entropies", "float32", "entropy of the next-token distribution, nats"),
    ("sum_pi_squared", "float32", "sum of the squared probabilities of all tokens, under the weights of old_logprobs"),
    ("routes", "uint8", "experts that each token went to in the engine, (N, w) bytes; 255: not recorded"),
    ("values", "float32", "critic's value before each token"),
    (
        "token_rewards",
        "float32",
        "reward at each token: a stage's or an episode's, or else all of it, any KL penalty included",
    ),
    ("advantages", "float32", "advantage of each token"),
    ("returns", "float32", "target of the critic at each token"),
    ("tis_weights", "float32", "importance weight old / rollout of each token, truncated or zeroed beyond its bounds"),
    ("loss_mask", "bool", "False where a rejection leaves the token out of the loss; absent: all of response_mask"),
)
_ROW_COLUMNS = (
    ("rewards", "float32", "score of the whole answer"),
    ("reward_components", "float32", "the K weighted terms (B, K) that the reward of a sample is the sum of"),
    ("reward_valid", "bool", "False where scoring failed: the sample counts in no statistic and no loss"),
    ("reward_baselines", "float32", "score of the greedy answer to the sample's prompt"),
    ("group_ids", "int64", "ticket of the sample's group, unique within a partition"),
    ("sample_index", "int64", "index of the sample in its group"),
    ("truncated", "bool", "True where the answer hit the token limit"),
    ("preferred", "bool", "True for the better answer of a pair, or for an answer marked good"),
    ("reference_point", "float32", "KL to the reference that an answer's gain is measured from (KTO)"),
    ("old_version", "int64", "weights version that scored old_logprobs, one for a whole partition (fully async)"),
)
_OBJECT_COLUMNS = (
    ("uid", "str", "id of the prompt"),
    ("ground_truth", "object", "what the scorer compares the answer with"),
    ("data_source", "str", "name of the data set"),
    ("extra_info", "dict", "whatever else the data set says of the prompt"),
    ("prompt_text", "str", "the prompt before tokenisation"),
    ("images", "Images", "what the prompt shows, one object for all samples of a group; None: nothing"),
    (
        "messages",
        "object",
        "chat messages of the prompt, or of the whole episode; None where it is plain text",
    ),
    (
        "answer_text",
        "str",
        "what is scored where that is not all of responses: the last turn of an episode",
    ),
    ("scoring", "dict", "what the scorer said beside the reward: why there is none, further numbers, words"),
    ("episode", "dict", "turns, tool calls, seconds, why it was cut, and the messages of an episode"),
)

declare_column("prompts", Kind.RAGGED, "int64", "prompt token ids as the engine got them")
declare_column(
    "prompt_routes", Kind.RAGGED, "uint8", "experts that each token of the prompt went to", aligned_with="prompts"
)
for _name, _dtype, _text in _RESPONSE_COLUMNS:
    declare_column(_name, Kind.RAGGED, _dtype, _text, aligned_with=None if _name == "responses" else "responses")
for _name, _dtype, _text in _ROW_COLUMNS:
    declare_column(_name, Kind.ROW, _dtype, _text)
for _name, _dtype, _text in _OBJECT_COLUMNS:
    declare_column(_name, Kind.OBJECT, _dtype, _text)
