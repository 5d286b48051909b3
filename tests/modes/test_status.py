"""A running job is asked by the command itself: partitions, tickets, engines, steps, and who waits for whom."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.columns.proto import DataProto
from tandem.control.entry import LOOPS
from tandem.observe.status.channel import ask
from tandem.observe.status.status import Status
from tests.e2e.seven import prepare

TWO_STEPS = ("trainer.total_steps=2", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2")
HELD = """
import pathlib, time
def held(response):
    pathlib.Path({begun!r}).touch()
    end = time.monotonic() + 60
    while not pathlib.Path({go!r}).exists() and time.monotonic() < end:
        time.sleep(0.01)
    return float(len(response))
"""
STREAMING = "max_staleness: 1, num_iters_per_train_update: 2"
MODES = {
    "colocate": "{mode: colocate}",
    "hybrid": f"{{mode: hybrid, {STREAMING}}}",
    "fully_async": f"{{mode: fully_async, {STREAMING}}}",
}


def asked(folder: Path) -> Status:
    return Status.of_json(ask(folder, "status"))


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)


def run(task: Path, folder: Path, *words: str, at_end_of: Callable[[int], None] = lambda step: None) -> None:
    """Two steps of the end-to-end task."""
    session = prepare(task, f"trainer.output_dir={folder}", *TWO_STEPS, *words)
    end_step = session.run.end_step

    def watched(step: int, batch: DataProto, update: dict[str, float]) -> None:
        at_end_of(step)
        end_step(step, batch, update)

    object.__setattr__(session.run, "end_step", watched)
    with session.run.running():
        LOOPS[session.plan.loop](session)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_in_every_mode_says_how_it_stands(task: Path, tmp_path: Path, mode: str) -> None:
    found: list[Status] = []
    run(task, tmp_path, f"execution={MODES[mode]}", at_end_of=lambda step: found.append(asked(tmp_path)))
    first, second = found
    assert (first.step, second.step, first.last) == (0, 1, 2)
    assert [part.what for part in second.doing] == ["step"]
    trained = {line.partition: line for line in second.partitions}[1]
    assert (trained.filled, trained.tickets, trained.tasks["train"]) == (4, 4, [4, 0, 0])
    (engine,) = second.engines
    assert engine.version == 1
    assert set(second.roles) == ({"advantages", "actor_fwd"} & set(second.roles) if mode == "fully_async" else set())
    assert mode != "fully_async" or "advantages" in second.roles


@pytest.mark.parametrize("mode", MODES)
def test_while_scores_are_awaited_it_is_said_who_waits_for_whom(task: Path, tmp_path: Path, mode: str) -> None:
    scorer, begun, go = tmp_path / "held.py", tmp_path / "begun", tmp_path / "go"
    scorer.write_text(HELD.format(begun=str(begun), go=str(go)))
    statuses: list[Status] = []

    def look() -> None:
        until(begun.exists)
        while not statuses or not any("waits for rewards" in wait.cause for wait in statuses[-1].waits):
            statuses.append(asked(tmp_path / "run"))
        go.touch()

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    run(task, tmp_path / "run", f"execution={MODES[mode]}", f"reward_manager={{type: held, file: {scorer}}}")
    status = statuses[-1]
    assert status.partitions[0].filled < status.partitions[0].tickets == 4
    assert status.partitions[0].generated >= 1 and status.partitions[0].longest
    assert sum(len(engine.tickets) for engine in status.engines) >= 1
    assert status.waits[0].who.startswith("the step" if mode == "colocate" else f"train_{mode}(rollout_id=0)")
    assert "of 4 groups unfilled" in status.waits[0].cause and "rollout" in status.waits[0].cause
