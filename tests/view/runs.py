"""Run folders made by the parts that real runs write with, of chosen rewards and texts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tandem.config.trainer import SamplesConfig
from tandem.observe.about import note_begin, note_end
from tandem.observe.metrics import MetricLog
from tandem.observe.samples.store import SampleStore
from tests.observe.sample_batches import scored

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">",
    "</pre></script><style>body{display:none}</style><!--",
    "\x1b[31mred\x1b[0m \x07\x00",
    "\u202egnp.exe\u2066 \u200b\u2028 \ud800",
    "x" * 100_000,
)
"""Answers that a page must not take for its own: markup, ANSI, marks of direction, a word without an end."""


def make_run(
    folder: Path,
    *,
    steps: int = 6,
    groups: int = 3,
    n: int = 4,
    texts: Sequence[str] = (),
    lr: float = 1e-3,
    ended: bool = True,
    tokens: bool = False,
) -> Path:
    """A run whose reward rises, but for the prompt of the first group, whose reward falls; the last answer fails."""
    folder.mkdir(parents=True)
    note_begin(folder, None)
    config = {"trainer": {"seed": 0, "api_key": "hunter2"}, "optim": {"lr": lr}, "data": {"train_batch_size": groups}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    log, store = MetricLog(folder), SampleStore(folder, SamplesConfig(tokens=tokens))
    for step in range(1, steps + 1):
        add_step(log, store, step, steps, (groups, n), texts)
    log.close()
    if ended:
        note_end(folder, None)
    return folder


def add_step(
    log: MetricLog, store: SampleStore, step: int, steps: int, shape: tuple[int, int], texts: Sequence[str] = ()
) -> None:
    """Write one step more of such a run, of (groups, answers to each)."""
    groups, n = shape
    count, noise = groups * n, random.Random(step)
    shares = [1 - step / steps if place < n else step / steps for place in range(count)]
    known = [round(min(1.0, share + 0.05 * noise.random()), 3) for share in shares[:-1]]
    batch = scored(
        [texts[i] if i < len(texts) else f"answer {step}.{i // n}.{i % n}" for i in range(count)],
        [*known, float("nan")],
        prompts=[f"question {i // n}" for i in range(count)],
        failures=[*[""] * (count - 1), "ValueError: no number in it"],
        notes=[{"reply": "a judge's word"}, *[dict[str, str]()] * (count - 1)],
        version=step - 1,
        advantages=[0.5] * count,
        group=n,
    )
    store.keep("train", step, batch)
    store.keep("eval", step, batch[:n])
    store.settle()
    metrics: dict[str, float] = {
        "reward/mean": sum(known) / len(known),
        "reward/scored_share": len(known) / count,
        "entropy/mean": 1 / step,
        "length/mean": 10.0,
        "time/step": 2.0,
        "time/train": 1.5,
        "cpu/train": 1.0,
        "time/rollout": 0.5,
        "cpu/rollout": 0.5,
        "throughput/tokens_per_second": 100.0,
        "eval/reward": known[0],
    }
    log.append(step, metrics)


def append_line(folder: Path, row: dict[str, object]) -> None:
    """A line more of metrics, as a run that goes on writes it."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def spoil(run: Path) -> None:
    """Leave the samples of the first three steps empty, cut, and in another form."""
    first, second, third = sorted((run / "samples").glob("train-*"))[:3]
    first.write_bytes(b"")
    second.write_bytes(second.read_bytes()[:-20])
    pq.write_table(pa.table({"step": ["one"], "text": ["answer"]}), third)
