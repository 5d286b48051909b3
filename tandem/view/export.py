"""The page as a file to send to somebody: curves whole, and as many samples as a file should have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]

from tandem.base.folders import write_error
from tandem.observe.samples.parts import KINDS, Kind, parts_in
from tandem.view.document import self_contained
from tandem.view.findings import find
from tandem.view.runs import RunFolder

MOST_SAMPLES = 2000
"""Of each run and kind."""
MOST_CHARACTERS = 4000
"""Of a text."""


def write_export(runs: Mapping[str, RunFolder], out: Path) -> int:
    """Write the page over ``runs`` to ``out``; return how many bytes it has. Raises ``WriteError``."""
    data = {"runs": [_run(run) for run in runs.values()]}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return out.write_bytes(self_contained(data).encode("utf-8"))
    except OSError as error:
        raise write_error(error, out) from error


def _run(run: RunFolder) -> dict[str, Any]:
    run.look()
    described = run.describe()
    return {
        **described,
        "curves": run.curves(),
        "findings": [asdict(finding) for finding in find(run.metrics.rows, described["config"])],
        "kept": {kind: exported_samples(run.path, kind) for kind in KINDS},
        "prompts": {kind: run.samples.prompts(kind) for kind in KINDS},
        "failures": {kind: run.samples.failures(kind) for kind in KINDS},
    }


def exported_samples(folder: Path, kind: Kind, most: int = MOST_SAMPLES) -> list[dict[str, Any]]:
    """Return samples of whole steps: the newest and the first, then those between, evenly, until there are ``most``."""
    parts = [part for part in parts_in(folder) if part.kind == kind]
    counts = {part: pq.ParquetFile(part.path).metadata.num_rows for part in parts}
    chosen, room = list[int](), most
    for place in _outside_in(len(parts)):
        if counts[parts[place]] <= room or not chosen:
            chosen.append(place)
            room -= counts[parts[place]]
    rows: list[dict[str, Any]] = []
    for place in sorted(chosen):
        rows += pq.read_table(parts[place].path).slice(0, most).to_pylist()
    return [_cut(row) for row in rows]


def _outside_in(count: int) -> list[int]:
    """Return all places, the last, the first, then halves of what lies between."""
    order, gaps = [count - 1, 0][:count], [(0, count - 1)]
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if low < middle < high:
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order


def _cut(row: dict[str, Any]) -> dict[str, Any]:
    texts = {name: row[name] for name in ("prompt", "response", "ground_truth", "extra_info")}
    shown = {name: text[:MOST_CHARACTERS] for name, text in texts.items()}
    cut = [name for name, text in texts.items() if len(text) > MOST_CHARACTERS]
    return {**row, **shown, "scores": dict(row["scores"]), "notes": dict(row["notes"]), "cut": cut}
