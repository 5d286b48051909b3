"""A disk that takes no more: the trained weights go where there is room, or one line says how to get them."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from tandem.base.manifest import verify
from tandem.cli.app import app
from tests.e2e.seven import write_rows

SMALL = ("data.train_batch_size=2", "actor_rollout_ref.rollout.n=2", "trainer.total_steps=2")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """A full disk: no scratch folder with ``part`` in its name can be made below ``place`` once ``since`` is there."""
    places: list[tuple[Path, str, Path]] = []
    begin: Any = tempfile.mkdtemp

    def mkdtemp(suffix: Any = None, prefix: Any = None, dir: Any = None) -> str:  # as the library has it
        for place, part, since in places:
            if dir is not None and Path(dir).is_relative_to(place) and part in str(prefix) and since.exists():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return str(begin(suffix, prefix, dir))

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    for name in ("home", "temporary"):
        (tmp_path / name).mkdir()
    return lambda place, part="", since=tmp_path: places.append((place, part, since))


def run(command: str, *words: object) -> Result:
    return CliRunner().invoke(app, [command, *map(str, words)])


def one_line(result: Result) -> str:
    """What the command said of its end; it failed, and without a traceback."""
    assert result.exit_code == 1, result.output
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert "Traceback" not in result.output
    return line


def test_a_model_that_can_not_be_written_at_the_end_goes_where_there_is_room(
    task: Path, tmp_path: Path, full: Callable[..., None]
) -> None:
    out = tmp_path / "runs" / "first"
    full(out)
    full(tmp_path / "runs")
    told = one_line(run("train", task, *SMALL, f"trainer.output_dir={out}"))
    kept = tmp_path / "first-step-2"
    assert f"{out / 'final'}: no room is left to write to" in told
    assert f"The model of step 2 was written to {kept} instead" in told
    verify(kept)
    assert not (out / "final").exists()


def test_a_checkpoint_of_the_last_step_is_where_the_weights_are(
    task: Path, tmp_path: Path, full: Callable[..., None]
) -> None:
    out = tmp_path / "run"
    full(out, ".final.")
    told = one_line(run("train", task, *SMALL, f"trainer.output_dir={out}", "trainer.save_interval=2"))
    checkpoint = out / "checkpoints" / "step_00000002"
    assert f"tandem export {checkpoint} FOLDER" in told
    assert run("export", checkpoint, tmp_path / "exported").exit_code == 0
    verify(tmp_path / "exported")


def test_where_there_is_no_room_at_all_the_last_checkpoint_is_named(
    task: Path, tmp_path: Path, full: Callable[..., None]
) -> None:
    out = tmp_path / "run"
    full(tmp_path, since=out / "checkpoints" / "step_00000001")
    told = one_line(run("train", task, *SMALL, f"trainer.output_dir={out}", "trainer.save_interval=1"))
    assert "The model of step 2 is lost" in told
    assert f"1 steps are saved in {out / 'checkpoints'}: go on from there with --resume" in told


def test_a_checkpoint_that_can_not_be_written_keeps_the_model_elsewhere(
    task: Path, tmp_path: Path, full: Callable[..., None]
) -> None:
    out = tmp_path / "run"
    full(out / "checkpoints")
    told = one_line(run("train", task, *SMALL, f"trainer.output_dir={out}", "trainer.save_interval=1"))
    assert f"The model of step 1 was written to {tmp_path / 'run-step-1'} instead" in told
    assert str(out / "checkpoints") in told
    assert not list((out / "checkpoints").glob(".*"))


def test_nothing_saved_and_no_room_promises_nothing(task: Path, tmp_path: Path, full: Callable[..., None]) -> None:
    full(tmp_path)
    told = one_line(run("train", task, *SMALL, f"trainer.output_dir={tmp_path / 'run'}"))
    assert "The model of step 2 is lost" in told and "no step before it was saved" in told
    assert "--resume" not in told


def test_the_critic_is_kept_as_the_model_is(task: Path, tmp_path: Path, full: Callable[..., None]) -> None:
    out = tmp_path / "run"
    full(out, ".critic.")
    critic = ("algorithm.adv_estimator=gae", "critic.enable=true")
    told = one_line(run("train", task, *SMALL, *critic, f"trainer.output_dir={out}"))
    assert f"The critic of step 2 was written to {tmp_path / 'run-critic-step-2'} instead" in told
    verify(out / "final")


def test_a_tuned_model_is_kept_too(task: Path, tmp_path: Path, full: Callable[..., None]) -> None:
    rows = write_rows(tmp_path / "sft.jsonl", [{"prompt": f"{d}>", "response": str(d)} for d in range(8)])
    tree = {
        "model": {"path": str(task.parent / "model")},
        "data": {"train_files": [str(rows)], "max_length": 8, "train_batch_size": 4},
        "trainer": {"total_steps": 1, "logger": [], "output_dir": str(tmp_path / "tuned")},
        "runtime": {"torch_threads": 1},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(tree))
    full(tmp_path / "tuned")
    told = one_line(run("sft", tmp_path / "sft.yaml"))
    assert f"was written to {tmp_path / 'tuned-step-1'} instead" in told


def test_a_place_for_checkpoints_that_is_none_is_named(task: Path, tmp_path: Path, full: Callable[..., None]) -> None:
    """A file where the folder belongs stands for one that can't be written, which nothing is for root."""
    out = tmp_path / "run"
    words = (task, "trainer.total_steps=2", f"trainer.output_dir={out}")
    assert run("train", *words).exit_code == 0
    (out / "checkpoints").write_text("")
    saved = ("trainer.save_interval=1", "trainer.resume=auto")
    result = run("train", *words, *saved)
    assert result.exit_code != 0 and str(out / "checkpoints") in result.stderr and "Traceback" not in result.output
