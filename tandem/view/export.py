"""The page as a file to send to somebody: curves whole, and as many samples as a file should have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tandem.base.folders import write_error
from tandem.observe.metrics import to_json
from tandem.observe.samples.parts import KINDS, Kind
from tandem.view.document import pages, self_contained
from tandem.view.findings import find
from tandem.view.runs import RunFolder
from tandem.view.samples import SampleIndex

MOST_SAMPLES = 2000
"""Of each run and kind."""
MOST_CHARACTERS = 4000
"""Of a text."""


def write_export(runs: Mapping[str, RunFolder], out: Path) -> int:
    """Write the page over ``runs`` to ``out``; return how many bytes it has. Raises ``WriteError``."""
    data = {"runs": [_run(run) for run in runs.values()], "pages": pages()}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return out.write_bytes(self_contained(data).encode("utf-8"))
    except OSError as error:
        raise write_error(error, out) from error


def _run(run: RunFolder) -> dict[str, Any]:
    run.look()
    tables = {
        "kept": {kind: to_json(exported_samples(run.samples, kind)) for kind in KINDS},
        "prompts": {kind: run.samples.prompts(kind) for kind in KINDS},
        "failures": {kind: run.samples.failures(kind) for kind in KINDS},
    }
    described = run.describe()  # after them: it says which files could not be read
    return {
        **described,
        **tables,
        "curves": run.curves(),
        "timeline": run.timeline(),
        "findings": [asdict(finding) for finding in find(run.metrics.rows, described["config"])],
    }


def exported_samples(samples: SampleIndex, kind: Kind, most: int = MOST_SAMPLES) -> list[dict[str, Any]]:
    """Return samples of whole steps: the newest and the first, then those between, evenly, until there are ``most``."""
    counts = samples.counts(kind)
    files, room = list(counts), most
    chosen: dict[int, list[dict[str, Any]]] = {}
    for place in _outside_in(len(files)):
        count = counts[files[place]]
        table = samples.read(files[place]) if count <= room or not chosen else None
        if table is not None:
            chosen[place] = [_cut(row) for row in table.slice(0, most).to_pylist()]
            room -= count
    return [row for place in sorted(chosen) for row in chosen[place]]


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
