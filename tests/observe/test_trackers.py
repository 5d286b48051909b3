from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.base.errors import UnknownNameError
from tandem.observe.metrics import read_rows
from tandem.observe.trackers import MAX_FAILURES, TRACKERS, RunEnd, RunInfo, Tracker, Trackers
from tandem.observe.trackers.fence import Beside
from tandem.roles.batch_metrics import distributions
from tests.observe.sample_batches import scored

REPEATS = 2 * MAX_FAILURES


class Failing:
    """A tracker whose ``fails_in`` part raises ``error``; the first ``healthy_after`` calls only, if that is given."""

    fails_in = ""
    error: BaseException = ConnectionError("no route")
    healthy_after: int | None = None
    calls: list[str]

    def __init__(self, run: RunInfo) -> None:
        self.seen: list[int] = []
        type(self).calls = getattr(type(self), "calls", [])
        self._enter("init")

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        self._enter("log")
        self.seen.append(step)

    def finish(self) -> None:
        self._enter("finish")

    def _enter(self, part: str) -> None:
        calls = type(self).calls
        calls.append(part)
        healthy = self.healthy_after is not None and calls.count(part) > self.healthy_after
        if part == self.fails_in and not healthy:
            raise self.error


@pytest.fixture
def failing() -> Iterator[type[Failing]]:
    """A fresh registered class per test; the registry has no removal, so the name is taken out by hand."""
    kind = type("FailingHere", (Failing,), {"calls": []})
    TRACKERS.register("failing")(kind)
    yield kind
    del TRACKERS._entries["failing"]


def run_all(tmp_path: Path, names: list[str]) -> None:
    trackers = Trackers(names, RunInfo(tmp_path, total_steps=REPEATS))
    for step in range(1, REPEATS + 1):
        trackers.log(step, {"reward/mean": 0.5})
    trackers.finish()


@pytest.mark.parametrize("part", ["init", "log", "finish"])
@pytest.mark.parametrize("error", [ConnectionError("no route"), ValueError("bad key"), SystemExit(3)])
def test_b89_a_failing_tracker_never_ends_a_run(
    tmp_path: Path, failing: type[Failing], part: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    failing.fails_in, failing.error = part, error
    run_all(tmp_path, ["failing"])
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(1, REPEATS + 1))
    tries = failing.calls.count(part)
    assert tries == (1 if part == "finish" else MAX_FAILURES)  # given up after repeated failures
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (1 if part == "finish" else 2)
    assert all("'failing'" in text and str(error) in text for text in warnings)


def test_b89_a_tracker_that_recovers_is_used_again(tmp_path: Path, failing: type[Failing]) -> None:
    failing.fails_in, failing.healthy_after = "init", 2
    run_all(tmp_path, ["failing"])
    assert failing.calls.count("init") == 3
    assert failing.calls.count("log") == REPEATS - 1  # made again at the second step
    assert failing.calls.count("finish") == 1


def test_b89_a_failing_tracker_does_not_hide_steps_from_the_others(tmp_path: Path, failing: type[Failing]) -> None:
    failing.fails_in = "log"
    pytest.importorskip("tensorboard")
    run_all(tmp_path, ["failing", "tensorboard"])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == list(range(1, REPEATS + 1))


def test_distributions_go_to_the_trackers_that_show_them_and_are_not_looked_for_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def nobody_asks() -> dict[str, list[float]]:
        raise AssertionError

    Trackers([], RunInfo(tmp_path / "plain")).distributions(1, nobody_asks)
    trackers = Trackers(["tensorboard"], RunInfo(tmp_path))
    trackers.distributions(4, lambda: distributions(scored(["ab", "abcd"], [1.0, 0.0], advantages=[0.5, -0.5])))
    trackers.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {name: events.Histograms(f"distribution/{name}") for name in ("length", "reward", "advantage")}
    (length,), (reward,), (advantage,) = found.values()
    assert (length.step, length.histogram_value.min, length.histogram_value.max) == (4, 2, 4)
    assert (reward.histogram_value.num, advantage.histogram_value.num) == (2, 6)


def test_an_interrupt_passes_through_what_the_run_itself_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Interrupted", (Failing,), {"calls": [], "fails_in": "log", "error": KeyboardInterrupt()})
    TRACKERS.register("inline", inline=True)(kind)
    try:
        trackers = Trackers(["inline"], RunInfo(tmp_path))
        with pytest.raises(KeyboardInterrupt):
            trackers.log(1, {})
    finally:
        del TRACKERS._entries["inline"]


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A tracker that does nothing until it is let."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.busy, self.free = threading.Event(), threading.Event()

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        self.busy.set()
        assert self.free.wait(60)
        self.seen.append(step)

    def finish(self) -> None:
        self.seen.append(-1)


def tell(beside: Beside, *steps: int) -> None:
    for step in steps:
        beside.give(lambda tracker, step=step: tracker.log(step, {}))  # type: ignore[misc]


def test_a_tracker_that_hangs_is_not_waited_for_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow, clock = Slow(), Clock()
    beside = Beside("slow", lambda run: slow, RunInfo(tmp_path), hang_s=60.0, clock=clock)
    beside.start()
    tell(beside, 1, 2)
    assert slow.busy.wait(60) and not caplog.records
    clock.now += 60
    tell(beside, 3, 4)
    beside.end(lambda tracker: tracker.finish())
    beside.settle(clock.now + 1e9)  # the clock stands still: a wait for anything but its end would be for ever
    assert [record.getMessage() for record in caplog.records] == [
        "logger 'slow' has not answered for 60 s: the run goes on without waiting, and what it can't take is left out"
    ]
    slow.free.set()


def test_what_a_slow_tracker_has_no_room_for_is_left_out_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow, clock = Slow(), Clock()
    beside = Beside("slow", lambda run: slow, RunInfo(tmp_path), room=3, clock=clock)
    beside.start()
    tell(beside, 1)
    assert slow.busy.wait(60)
    tell(beside, 2, 3, 4, 5, 6)
    beside.end(lambda tracker: tracker.finish())
    slow.free.set()
    beside.settle(clock.now + 1)
    assert slow.seen == [1, 2, 3, 4, -1]  # in their order, and its end comes at any rate
    said = [record.getMessage() for record in caplog.records]
    assert ["is slower than the run" in said[0], "too slow for 2 entries" in said[1], len(said)] == [True, True, 2]


def test_a_tracker_is_told_of_samples_and_of_the_end_where_it_has_methods_for_them(
    tmp_path: Path, failing: type[Failing]
) -> None:
    told: list[object] = []

    def samples(self: Tracker, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        told.append((step, [row["prompt"] for row in rows]))

    def ended(self: Tracker, end: RunEnd) -> None:
        told.append(end)

    failing.samples, failing.ended = samples, ended  # type: ignore[attr-defined]
    trackers = Trackers(["failing", "jsonl"], RunInfo(tmp_path, total_steps=300))
    for step in (1, 2, 3, 6, 300):
        trackers.samples(step, [{"prompt": "a"}, {"prompt": "b"}])
    trackers.samples(3, [])
    end = RunEnd("failed", "ValueError: x", {"seconds": 2})
    trackers.finish(end)
    assert told == [*((step, ["a", "b"]) for step in (3, 6, 300)), end]  # about a hundred tables of a long run
    assert failing.calls[-1] == "finish"


def test_an_unknown_logger_lists_the_near_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'tensorboard'"):
        Trackers(["tensorbord"], RunInfo(tmp_path))


def test_a_missing_package_costs_only_its_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    run_all(tmp_path, ["tensorboard"])
    assert len(read_rows(tmp_path / "metrics.jsonl")) == REPEATS
    assert "pip install 'tandem-rl[tracking]'" in caplog.text


def test_jsonl_is_there_once_whether_named_or_not(tmp_path: Path) -> None:
    run_all(tmp_path, ["jsonl"])
    assert len(read_rows(tmp_path / "metrics.jsonl")) == REPEATS


def test_trackers_get_plain_numbers(tmp_path: Path, failing: type[Failing]) -> None:
    got: dict[str, object] = {}
    failing.log = lambda self, step, metrics: got.update(metrics)  # type: ignore[method-assign]
    trackers = Trackers(["failing"], RunInfo(tmp_path))
    trackers.log(1, {"a": torch.tensor(0.5), "b": np.int64(3), "c": 1.5})
    trackers.finish()
    assert got == {"a": 0.5, "b": 3, "c": 1.5}
    assert [type(value) for value in got.values()] == [float, int, float]
