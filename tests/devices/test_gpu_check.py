"""The checks for a GPU find what they should on a simulated device, and say so where there is none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.devices import sim
from tools import gpu_check


@pytest.fixture
def folder(task: Path) -> str:
    return str(task.parent / "model")


@pytest.mark.parametrize("name", ["train", "sleep", "tags"])
def test_a_device_that_does_what_the_cpu_does_works(name: str, folder: str) -> None:
    assert gpu_check.CHECKS[name](folder, "sim:0").startswith("works: ")


def test_a_train_engine_that_keeps_its_moments_is_wrong(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.train.updater.Updater.park_moments", lambda updater: None)
    with pytest.raises(gpu_check.Wrong, match=r"asleep, of the weights .*, at most 1\.2 was expected"):
        gpu_check.sleep(folder, "sim:0")


def test_attention_that_makes_a_table_of_scores_is_wrong(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device has the plain kernel alone, and is told so."""
    monkeypatch.setattr(gpu_check, "LENGTH", 256)
    with pytest.raises(gpu_check.Wrong, match=r"of a table of all scores, at most 0\.25 was expected"):
        gpu_check.attention(folder, "sim:0")


def test_a_second_device_is_asked_for(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "COUNT", 1)
    assert gpu_check.hybrid(folder, "sim:0") == "not there: needs two devices"


def test_the_peak_of_a_run_is_not_far_above_what_the_plan_says(folder: str) -> None:
    sim.accounts[0].reset_peak()
    assert gpu_check.colocate(folder, "sim:0").startswith("works: ")


def test_without_a_gpu_a_check_says_so_and_is_no_failure(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main("train", folder) == 0
    assert capsys.readouterr().out == "train: not there: this torch finds no CUDA device\n"


def test_the_script_asks_for_every_check_within_eight_minutes() -> None:
    script = Path("tools/gpu_check.sh").read_text("utf-8")
    asked = [line.split() for line in script.splitlines() if line.startswith("check ")]
    assert [name for _, name, _ in asked] == list(gpu_check.CHECKS)
    assert sum(int(seconds) for _, _, seconds in asked) <= 480
    assert subprocess.run(["sh", "-n", "tools/gpu_check.sh"], check=False).returncode == 0
