"""DataProto against the reference: a batch of n rows has a column ``x`` = 0, 1, … and a field ``s`` = "r0", "r1", …

Ours has declared columns only, so the cases' names stand for columns of the same kind. Results are given in the form in
which the case expects them: as columns of a batch, as parts, as sizes or as names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tests.oracle.oracle_file import Case, Inputs
from tests.oracle.oracle_verdict import DIFFERENCES, REFUSED, Answer, Difference, Right, adapter
from tests.oracle.right_numeric import permutes

OURS = {"x": "sample_index", "y": "group_ids", "s": "uid"}
THEIRS = {ours: theirs for theirs, ours in OURS.items()}


def numbered(case: Case) -> DataProto:
    """The batch of ``n`` rows, with the case's ``meta`` where it has any."""
    rows, meta = case.inputs["n"], case.inputs.get("meta")
    return batch_of(rows, meta.plain() if isinstance(meta, Inputs) else meta)


def batch_of(rows: int, meta: dict[str, Any] | None = None) -> DataProto:
    return DataProto({OURS["x"]: torch.arange(rows)}, {OURS["s"]: [f"r{i}" for i in range(rows)]}, meta)


def column(batch: DataProto, name: str = "x") -> list[int]:
    rows: list[int] = batch.dense(OURS[name]).tolist()
    return rows


def names(batch: DataProto) -> list[str]:
    return sorted(THEIRS[name] for name in batch.columns)


def content(batch: DataProto) -> dict[str, Any]:
    """All that a batch holds, under the cases' names."""
    held: dict[str, Any] = {THEIRS[name]: batch.dense(name).tolist() for name in batch.batch}
    held |= {THEIRS[name]: list(items) for name, items in batch.non_tensor_batch.items()}
    return held | {"meta": batch.meta_info}


def formed(batch: DataProto, like: Any) -> Any:
    """A batch in the form of ``like``: its content, its length, the names of its columns, or a column."""
    if isinstance(like, Mapping):
        extra = {"n": len(batch), "len": len(batch), "keys": names(batch)}
        return {key: (content(batch) | extra).get(key) for key in like} | content(batch)
    if isinstance(like, int):
        return len(batch)
    if isinstance(like, list) and like and all(isinstance(item, str) for item in like):
        return names(batch) if set(like) <= set(OURS) else list(batch.non_tensor_batch[OURS["s"]])
    return column(batch) if OURS["x"] in batch.columns else names(batch)


def other_input(case: Case) -> Any:
    """The one input beside ``n`` and ``meta``, whatever it is called."""
    (name,) = [name for name in case.inputs if name not in ("n", "meta")]
    return case.inputs[name]


def parts_as_expected(case: Case, parts: list[DataProto]) -> Answer:
    """Parts under the case's name, each in the form of its counterpart."""
    if case.refused:
        return Answer({"parts": [content(part) for part in parts]})
    found = {}
    for key, like in case.expected.items():
        forms = like if isinstance(like, list) else [like]
        shapes = [forms[min(i, len(forms) - 1)] for i in range(len(parts))] if forms else [{}] * len(parts)
        found[key] = [formed(part, shape) for part, shape in zip(parts, shapes, strict=True)]
        if isinstance(like, int):
            found[key] = len(parts)  # type: ignore[assignment]
    return Answer(found)


@adapter("batch", "pad_to_divisor")
def pad_to_divisor(case: Case) -> Answer:
    padded, pad = numbered(case).pad_to_divisor(case.inputs["divisor"])
    unpadded = padded.unpad(pad)
    return Answer({"pad": pad, "rows": column(padded), "after_unpad": column(unpadded)})


@adapter("batch", "repeat")
def repeat(case: Case) -> Answer:
    return Answer(content(numbered(case).repeat(case.inputs["times"], case.inputs.get("interleave", True))))


@adapter("batch", "sample_level_repeat")
def sample_level_repeat(case: Case) -> Answer:
    times = other_input(case)
    return Answer(content(numbered(case).repeat(times.tolist() if isinstance(times, torch.Tensor) else list(times))))


@adapter("batch", "chunk")
def chunk(case: Case) -> Answer:
    return parts_as_expected(case, numbered(case).chunk(other_input(case)))


@adapter("batch", "split")
def split(case: Case) -> Answer:
    return parts_as_expected(case, numbered(case).split(other_input(case)))


@adapter("batch", "concat")
def concat(case: Case) -> Answer:
    sizes = case.inputs["sizes"]
    parts = [batch_of(size, meta) for size, meta in zip(sizes, case.inputs.get("meta", [{}] * len(sizes)), strict=True)]
    return Answer(content(DataProto.concat(parts)))


@adapter("batch", "union")
def union(case: Case) -> Answer:
    given = case.inputs
    sides = []
    for side in ("left", "right"):
        columns, meta = given.get(side, {}), given.get(f"{side}_meta", {})
        sides.append(DataProto({OURS[n]: torch.tensor(v) for n, v in columns.items()}, {}, dict(meta)))
    return Answer(content(sides[0].union(sides[1])))


@adapter("batch", "reorder")
def reorder(case: Case) -> Answer:
    return Answer(content(numbered(case).reorder(other_input(case))))


def rows_of(case: Case) -> Any:
    """Rows as an int, a list, a mask or a tensor; as ``[start, end, step]`` or a text with colons where it is a slice;
    as three inputs of their own."""
    if any(name in case.inputs for name in ("start", "end", "step")):
        return slice(*[case.inputs.get(name) for name in ("start", "end", "step")])
    rows = other_input(case)
    if isinstance(rows, Inputs):
        return slice(rows.get("start"), rows.get("end", rows.get("stop")), rows.get("step"))
    if isinstance(rows, str):
        return slice(*[int(part) if part else None for part in rows.split(":")])
    if isinstance(rows, list) and ("slice" in case.scenario or "step" in case.scenario or None in rows):
        return slice(*rows)
    return rows


@adapter("batch", "index", "slice", "select_idxs")
def index(case: Case) -> Answer:
    batch, rows = numbered(case), rows_of(case)
    try:
        taken: Any = batch[rows]
    except IndexError as refusal:
        raise ContractError(str(refusal)) from refusal
    if isinstance(taken, DataProto):
        return Answer(content(taken))
    return Answer({"x": taken.batch[OURS["x"]], "s": taken.non_tensor_batch[OURS["s"]], "meta": taken.meta_info})


@adapter("batch", "pop")
def pop(case: Case) -> Answer:
    """Columns by name. What the case calls by a word with "pop" or "taken" in it is what came out, the rest is left."""
    batch = numbered(case)
    asked = [name for key in case.inputs if key not in ("n", "meta") for name in case.inputs[key] or []]
    taken = batch.pop(*[OURS.get(name, name) for name in asked])
    if case.refused:
        return Answer(content(taken))
    if set(case.expected) <= {*OURS, "meta"}:
        return Answer(content(taken))
    came_out = {key: "pop" in key or "taken" in key or key == "out" for key in case.expected}
    return Answer({key: formed(taken if came_out[key] else batch, like) for key, like in case.expected.items()})


def refused(case: Case) -> Right:
    return REFUSED


def backwards(case: Case) -> bool:
    rows = rows_of(case)
    return isinstance(rows, slice) and rows.step is not None and rows.step < 0


def sliced(case: Case) -> Right:
    """As Python slices a list."""
    rows = list(range(case.inputs["n"]))[rows_of(case)]
    return {"x": rows, "s": [f"r{i}" for i in rows], "meta": {}}


DIFFERENCES += [
    Difference(
        "batch",
        "reorder takes a permutation; rows are chosen by indexing",
        lambda case: not permutes(other_input(case), case.inputs["n"]),
        refused,
        frozenset({"reorder"}),
    ),
    Difference(
        "batch",
        "a negative step takes the rows backwards",
        backwards,
        sliced,
        frozenset({"index", "slice"}),
    ),
]
