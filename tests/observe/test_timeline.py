from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tandem.observe.timeline import Stopwatch, Trace


def test_parts_add_up_and_start_again_after_a_drain() -> None:
    watch = Stopwatch()
    for _ in range(2):
        with watch.timed("rollout"):
            sum(range(1000))
    with watch.timed("train"), watch.timed("train/forward"):
        pass
    parts = watch.drain()
    assert set(parts) == {
        f"{kind}/{part}" for kind in ("time", "cpu") for part in ("rollout", "train", "train/forward")
    }
    assert all(seconds >= 0 for seconds in parts.values())
    assert parts["time/train"] >= parts["time/train/forward"]
    assert watch.drain() == {}


def test_a_part_that_raises_is_counted() -> None:
    watch = Stopwatch()
    with pytest.raises(RuntimeError), watch.timed("reward"):
        raise RuntimeError
    assert "time/reward" in watch.drain()


def test_the_trace_has_a_lane_per_thread_and_named_lane(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json", process="actor")
    watch = Stopwatch(trace)

    def work() -> None:
        with watch.timed("generate"):
            pass

    worker = threading.Thread(target=work, name="rollout")
    worker.start()
    worker.join()
    with watch.timed("train"), watch.timed("push", lane="weights"):
        pass
    trace.close()
    with watch.timed("late"):
        pass

    events = json.loads((tmp_path / "trace.json").read_text())
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["actor"]
    assert set(lanes) == {"rollout", "weights", "MainThread"}
    assert {name: span["tid"] for name, span in spans.items()} == {
        "generate": lanes["rollout"],
        "push": lanes["weights"],
        "train": lanes["MainThread"],
    }
    push, train = spans["push"], spans["train"]
    assert train["ts"] <= push["ts"]
    assert push["ts"] + push["dur"] <= train["ts"] + train["dur"] + 1


def test_a_trace_of_a_crashed_run_misses_only_its_end(tmp_path: Path) -> None:
    watch = Stopwatch(Trace(tmp_path / "trace.json"))
    with watch.timed("train"):
        pass
    events = json.loads((tmp_path / "trace.json").read_text() + "]")
    assert events[-1]["name"] == "train"
