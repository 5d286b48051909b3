"""``tandem status``: in words, for machines, and where nobody answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.base.run_folder import begin
from tandem.cli.app import app
from tandem.observe.about import note_begin
from tandem.observe.status.channel import control_channel
from tandem.observe.status.status import Doing, EngineLine, Status, Wait
from tandem.view.runs import RunFolder

STATUS = Status(
    1,
    2,
    [Doing("step", 0.5)],
    engines=[EngineLine("rollout-0", "at work", 1, [[1, 0, 0], [1, 3, 0], [2, 0, 0]])],
    waits=[Wait("train_hybrid(rollout_id=1)", "partition 1: 2 of 4 groups unfilled", 3.0)],
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    begin(tmp_path)
    note_begin(tmp_path, None)
    return tmp_path


def test_a_running_run_is_told_in_words_and_for_machines(folder: Path) -> None:
    with control_channel(folder, {"status": STATUS.to_json}):
        words = CliRunner().invoke(app, ["status", str(folder)])
        machines = CliRunner().invoke(app, ["status", str(folder), "--json"])
    assert words.exit_code == machines.exit_code == 0
    assert words.output.splitlines() == [
        "1 of 2 steps done; now: step (0.5 s)",
        "engine rollout-0: at work, weights version 1, tickets in hand: 2 of partition 1, 1 of partition 2",
        "train_hybrid(rollout_id=1) waits for 3.0 s: partition 1: 2 of 4 groups unfilled",
    ]
    assert Status.of_json(json.loads(machines.output)) == STATUS


def test_a_run_that_cannot_be_asked_is_an_error(folder: Path) -> None:
    found = CliRunner().invoke(app, ["status", str(folder / "absent")])
    assert found.exit_code == 2 and "no such folder" in found.output


def test_the_page_shows_what_a_running_run_says_and_goes_without(folder: Path) -> None:
    run = RunFolder("run", folder)
    with control_channel(folder, {"status": STATUS.to_json}):
        assert "1 of 2 steps done, now step; train_hybrid(rollout_id=1) waiting" in run.describe()["words"]
    with control_channel(folder, {"status": lambda: {"format": "of tomorrow"}}):
        assert "steps done" not in run.describe()["words"] and run.describe()["state"] == "running"
    assert "steps done" not in run.describe()["words"]
