"""What each service kept, read back by its own package, in one form for all."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Kept:
    """Numbers by name and step; tables, histograms by name; config and state as the service has them."""

    numbers: dict[str, dict[int, float]] = field(default_factory=dict)
    tables: list[list[Any]] = field(default_factory=list)
    histograms: set[str] = field(default_factory=set)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    states: list[Any] = field(default_factory=list)
    runs: set[str] = field(default_factory=set)


def read_mlflow(folder: Path) -> Kept:
    from mlflow import MlflowClient

    client, kept, beside = MlflowClient(), Kept(), folder.parent / "read"
    beside.mkdir(exist_ok=True)
    experiment = client.get_experiment_by_name("sums")
    for run in client.search_runs([experiment.experiment_id]):
        kept.runs.add(run.info.run_name)
        kept.states.append(run.info.status)
        kept.config = {**run.data.params}
        kept.summary = {key.removeprefix("tandem."): value for key, value in run.data.tags.items()}
        for name in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, name)
            assert len({one.step for one in history}) == len(history)  # nothing is told twice
            kept.numbers[name] = {one.step: one.value for one in history}
        local = Path(client.download_artifacts(run.info.run_id, "", str(beside)))
        for file in sorted(local.rglob("*.json")):
            document = json.loads(file.read_text())
            if "counts" in document:
                kept.histograms.add(str(file.parent.relative_to(local)))
            elif "columns" in document:
                kept.tables += document["data"]
        shown = json.loads(run.data.tags.get("mlflow.loggedArtifacts", "[]"))
        assert all((local / one["path"]).is_file() for one in shown)
    return kept


def read_trackio(folder: Path) -> Kept:
    from trackio.sqlite_storage import SQLiteStorage

    kept = Kept(runs=set(SQLiteStorage.get_runs("sums")))
    (name,) = kept.runs
    kept.config = SQLiteStorage.get_run_config("sums", name) or {}
    for row in SQLiteStorage.get_logs("sums", name):
        for key, value in row.items():
            if isinstance(value, dict) and value["_type"] == "trackio.histogram":
                kept.histograms.add(key)
            elif isinstance(value, dict) and key == "summary":
                kept.summary = {one["fact"]: one["value"] for one in value["_value"]}
            elif isinstance(value, dict):
                kept.tables += [list(one.values()) for one in value["_value"]]
            elif isinstance(value, int | float) and key != "step":
                assert row["step"] not in kept.numbers.get(key, {})
                kept.numbers.setdefault(key, {})[row["step"]] = value
    kept.states = [alert["title"] for alert in SQLiteStorage.get_alerts("sums", name)]
    return kept


def read_wandb(folder: Path) -> Kept:
    from wandb.proto import wandb_internal_pb2

    kept = Kept()
    for file in sorted(folder.rglob("*.wandb")):
        for data in _wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                kept.runs.add(f"{record.run.project}/{record.run.display_name}/{record.run.run_id}")
                kept.config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
            elif kind == "exit":
                kept.states.append(record.exit.exit_code)
            elif kind == "summary":
                kept.summary |= {one.key or one.nested_key[0]: one.value_json for one in record.summary.update}
            elif kind == "history":
                row = record.history.item
                _add_wandb_row(kept, {tuple(one.nested_key) or (one.key,): one.value_json for one in row})
    for file in sorted(folder.rglob("*.table.json")):
        kept.tables += json.loads(file.read_text())["data"]
    return kept


def _add_wandb_row(kept: Kept, row: dict[tuple[str, ...], str]) -> None:
    values = {key: json.loads(value) for key, value in row.items()}
    (step,) = [value for key, value in values.items() if key == ("_step",)]
    for (key, *inner), value in values.items():
        if (inner == ["_type"] and value == "histogram") or (isinstance(value, dict) and value["_type"] == "histogram"):
            kept.histograms.add(key)
        elif not inner and isinstance(value, int | float) and not key.startswith("_"):
            assert step not in kept.numbers.get(key, {})
            kept.numbers.setdefault(key, {})[step] = value


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, as W&B writes it: blocks of 32 KiB after 7 bytes."""
    block, at, parts = 32768, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if not kind:
            break
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield parts
            parts = b""
