from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.base.run_folder import ABOUT_FILE
from tandem.observe.about import note_begin, note_end, read_about, state_of
from tandem.observe.run_log import RunLog
from tandem.observe.trackers import RunInfo


def state(folder: Path) -> str:
    return state_of(folder, read_about(folder)).kind


def begun(folder: Path, **changes: Any) -> None:
    note_begin(folder, None)
    about = read_about(folder)
    about["starts"][-1] |= changes
    (folder / ABOUT_FILE).write_text(json.dumps(about))


def gone() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def test_a_run_is_running_until_its_log_ends(tmp_path: Path) -> None:
    with RunLog(RunInfo(tmp_path)):
        assert state(tmp_path) == "running"
    assert state(tmp_path) == "finished"


def test_a_run_that_failed_says_of_what_without_secrets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="away"), RunLog(RunInfo(tmp_path)):
        raise ValueError("https://me:hunter2@host/ is away")
    found = state_of(tmp_path, read_about(tmp_path))
    assert found.kind == "failed" and "is away" in found.words and "hunter2" not in found.words


def test_a_killed_run_is_told_from_one_that_goes_on(tmp_path: Path) -> None:
    begun(tmp_path, pid=gone())
    assert state(tmp_path) == "died"
    begun(tmp_path, pid=os.getpid())
    assert state(tmp_path) == "running"


def test_a_run_elsewhere_counts_as_dead_after_a_silence(tmp_path: Path) -> None:
    begun(tmp_path, host=socket.gethostname() + "-other", pid=1)
    assert state(tmp_path) == "running"
    os.utime(tmp_path / ABOUT_FILE, (0, 0))
    assert state(tmp_path) == "died"


def test_a_resume_keeps_the_starts_before_and_forgets_the_end(tmp_path: Path) -> None:
    note_begin(tmp_path, None)
    note_end(tmp_path, KeyboardInterrupt())
    assert state(tmp_path) == "interrupted"
    note_begin(tmp_path, 3)
    assert [start["resumed_step"] for start in read_about(tmp_path)["starts"]] == [None, 3]
    assert state(tmp_path) == "running"


def test_a_start_tells_command_versions_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/tandem", "train", "run.yaml", "reward_manager.api_key=sk-abcdefgh12345678"])
    note_begin(tmp_path, None)
    (start,) = read_about(tmp_path)["starts"]
    assert start["command"][:3] == ["tandem", "train", "run.yaml"] and "sk-abc" not in str(start)
    assert {"host", "began", "commit", "python"} <= start.keys() and "torch" in start["versions"]


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_notes_that_cannot_be_read_are_no_notes(tmp_path: Path, text: str) -> None:
    (tmp_path / ABOUT_FILE).write_text(text)
    assert read_about(tmp_path) == {} and state(tmp_path) == "unknown"


def test_odd_notes_are_unknown_and_end_no_resume(tmp_path: Path) -> None:
    odd: list[Any] = [{"starts": [{}]}, {"starts": [{"host": "h", "pid": -1}]}, {"ended": "yes"}, {"starts": 1}]
    for about in odd:
        (tmp_path / ABOUT_FILE).write_text(json.dumps(about))
        assert state(tmp_path) == "unknown", about
    note_begin(tmp_path, 3)
    assert state(tmp_path) == "running"


def test_a_module_run_as_the_command_is_noted_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/lib/tandem/__main__.py", "train", "run.yaml"])
    note_begin(tmp_path, None)
    assert read_about(tmp_path)["starts"][0]["command"] == ["tandem", "train", "run.yaml"]
