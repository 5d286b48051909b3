"""DataProto against the reference: a batch of n rows has a column ``x`` = 0, 1, … and a field ``s`` = "r0", "r1", …

Ours has declared columns only, so the cases' names stand for columns of the same kind.
"""

from __future__ import annotations

from typing import Any

import torch

from tandem.columns.proto import DataProto
from tests.oracle.oracle_file import Case
from tests.oracle.oracle_verdict import Answer, adapter

OURS = {"x": "sample_index", "y": "group_ids", "s": "uid"}


def numbered(rows: int, meta: dict[str, Any] | None = None) -> DataProto:
    return DataProto({OURS["x"]: torch.arange(rows)}, {OURS["s"]: [f"r{i}" for i in range(rows)]}, meta)


def content(batch: DataProto) -> dict[str, Any]:
    return {"x": column(batch), "s": list(batch.non_tensor_batch[OURS["s"]]), "meta": batch.meta_info}


def column(batch: DataProto, name: str = "x") -> list[int]:
    rows: list[int] = batch.dense(OURS[name]).tolist()
    return rows


@adapter("batch", "pad_to_divisor")
def pad_to_divisor(case: Case) -> Answer:
    padded, pad = numbered(case.inputs["n"]).pad_to_divisor(case.inputs["divisor"])
    unpadded = padded.unpad(pad)
    return Answer({"pad": pad, "rows": column(padded), "after_unpad": column(unpadded)})


@adapter("batch", "repeat")
def repeat(case: Case) -> Answer:
    return Answer(content(numbered(case.inputs["n"]).repeat(case.inputs["times"], case.inputs["interleave"])))


@adapter("batch", "chunk")
def chunk(case: Case) -> Answer:
    parts = [content(part) for part in numbered(case.inputs["n"]).chunk(case.inputs["chunks"])]
    if case.refused:
        return Answer({"chunks": parts})
    ((key, expected),) = case.expected.items()
    return Answer({key: parts if isinstance(expected[0], dict) else [part["x"] for part in parts]})


@adapter("batch", "concat")
def concat(case: Case) -> Answer:
    parts = [numbered(size, meta) for size, meta in zip(case.inputs["sizes"], case.inputs["meta"], strict=True)]
    return Answer(content(DataProto.concat(parts)))


@adapter("batch", "union")
def union(case: Case) -> Answer:
    given = case.inputs
    sides = [
        DataProto(
            {OURS[name]: torch.tensor(values) for name, values in given.get(side, {}).items()},
            {},
            given.get(f"{side}_meta"),
        )
        for side in ("left", "right")
    ]
    joined = sides[0].union(sides[1])
    held = {name: column(joined, name) for name, ours in OURS.items() if ours in joined.columns}
    return Answer(held | {"meta": joined.meta_info})


@adapter("batch", "index")
def index(case: Case) -> Answer:
    wanted = case.inputs["index"]
    rows: Any = slice(*wanted) if case.scenario == "slice" else wanted
    taken: Any = numbered(case.inputs["n"])[rows]
    if isinstance(taken, DataProto):
        return Answer(content(taken))
    return Answer({"x": taken.batch[OURS["x"]], "s": taken.non_tensor_batch[OURS["s"]], "meta": taken.meta_info})
