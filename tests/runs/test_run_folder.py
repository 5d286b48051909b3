"""One owner of a folder; an old run moves as one; what no run has written stays where and as it is."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.base import run_folder
from tandem.base.errors import ConfigError, WriteError
from tandem.base.run_folder import begin, owned


def make(folder: Path, *names: str) -> None:
    """Files with their own name in them; one that ends with / is a folder with a file inside."""
    for name in names:
        file = folder / name / "inside" if name.endswith("/") else folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)


def tree(folder: Path) -> dict[str, str]:
    """Every file but the notes of runs, with what is in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): p.read_text() for p in files if ".tandem" not in p.parts}


RUN = (
    "config.yaml",
    "metrics.jsonl",
    "rollouts.jsonl",
    "report.html",
    "final/",
    "checkpoints/step_00000002/",
    "critic/",
)


def test_all_of_an_old_run_moves_together(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert begin(folder) == []
    make(folder, *RUN)
    whole = tree(folder)
    make(folder, "notes.txt", "data/")
    told = begin(folder)
    assert told == [f"the earlier run in {folder} was moved to {tmp_path / 'run.1'}"]
    assert tree(folder) == {"notes.txt": "notes.txt", "data/inside": "data/"}
    assert tree(tmp_path / "run.1") == whole
    assert begin(folder) == []  # nothing was written since
    make(folder, "config.yaml")
    begin(folder)
    assert tree(tmp_path / "run.2") == {"config.yaml": "config.yaml"}
    assert begin(tmp_path / "run.1") and tree(tmp_path / "run.1.1") == whole  # it is a run's folder itself


@pytest.mark.parametrize("name", ["config.yaml", "final/", "report.html", "checkpoints/", "metrics.jsonl"])
def test_files_of_no_run_are_never_touched(tmp_path: Path, name: str) -> None:
    make(tmp_path, name, "other")
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=f"{name.rstrip('/')} in it would be replaced, and no run has written that"):
        begin(tmp_path)
    assert tree(tmp_path) == before
    with pytest.raises(ConfigError, match="no run has written that"):  # the first try left no note
        begin(tmp_path)


def test_a_run_that_goes_on_leaves_all_where_it_is(tmp_path: Path) -> None:
    begin(tmp_path)
    make(tmp_path, "config.yaml", "metrics.jsonl", "checkpoints/step_00000002/")
    before = tree(tmp_path)
    assert begin(tmp_path, goes_on_after=2, to=4) == []
    assert tree(tmp_path) == before


def test_what_a_run_that_goes_on_replaces_is_kept_under_one_number(tmp_path: Path) -> None:
    begin(tmp_path)
    make(tmp_path, *RUN, "checkpoints/step_00000004/")
    assert begin(tmp_path, goes_on_after=4, to=4) == []  # nothing is left to do
    make(tmp_path, "config.1.yaml")
    (told,) = begin(tmp_path, goes_on_after=2, to=4)
    assert told == f"what the run from step 2 on replaces is kept in {tmp_path}: final.2, critic.2, checkpoints.2"
    found = tree(tmp_path)
    assert found["final.2/inside"] == "final/" and found["metrics.2.jsonl"] == "metrics.jsonl"
    assert found["checkpoints.2/step_00000004/inside"] == "checkpoints/step_00000004/"
    assert found["checkpoints/step_00000002/inside"] and found["metrics.jsonl"] and "final/inside" not in found
    begin(tmp_path)
    assert tree(tmp_path) == {} and tree(tmp_path.with_name(f"{tmp_path.name}.1")) == found


@pytest.mark.parametrize("renames", range(9))
def test_a_move_that_was_killed_is_finished_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    folder, rename = tmp_path / "run", os.rename
    begin(folder)
    make(folder, *RUN)
    whole, left = tree(folder), [renames]

    class Killed(BaseException):
        pass

    def dying(source: Path, target: Path) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        rename(source, target)

    monkeypatch.setattr(os, "rename", dying)
    try:
        begin(folder)
    except Killed:
        assert renames < len(RUN)
    monkeypatch.undo()
    begin(folder)
    assert tree(folder) == {}
    assert tree(tmp_path / "run.1") == whole
    assert not (tmp_path / "run.2").exists()


def test_where_nothing_can_be_made_beside_the_folder_the_old_run_moves_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mkdir = tmp_path / "mounted", Path.mkdir
    begin(folder)
    make(folder, "config.yaml")

    def refused(path: Path, *arguments: int, **options: bool) -> None:
        if path.parent == tmp_path and not path.exists():
            raise PermissionError(13, "Permission denied", str(path))
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refused)
    begin(folder)
    assert tree(folder) == {"mounted.1/config.yaml": "config.yaml"}


LEFTOVERS = {
    "of a final model": (".final.partial-x1y2/", None),
    "of a model in a checkpoint": ("checkpoints/..model.partial.partial-abc/", None),
    "of a part": ("checkpoints/.critic.partial/", None),
    "of a checkpoint": ("checkpoints/.step_00000003.partial/", None),
    "of a replaced model": (".final.replaced-abc/old/", "final/inside"),
    "of a replaced checkpoint": ("checkpoints/.step_00000003.replaced-q/old/", "checkpoints/step_00000003/inside"),
}


@pytest.mark.parametrize("name", LEFTOVERS)
def test_what_killed_runs_left_is_cleared_by_the_next(tmp_path: Path, name: str) -> None:
    path, restored = LEFTOVERS[name]
    begin(tmp_path)
    make(tmp_path, "checkpoints/step_00000001/", path, ".mine.partial-abc/", "checkpoints/.mine.partial/")
    begin(tmp_path, goes_on_after=3, to=3)
    kept = {"checkpoints/step_00000001/inside", ".mine.partial-abc/inside", "checkpoints/.mine.partial/inside"}
    assert set(tree(tmp_path)) == kept | ({restored} if restored else set())


def test_leftovers_in_a_folder_of_no_run_are_the_users(tmp_path: Path) -> None:
    make(tmp_path, ".final.partial-abc/")
    begin(tmp_path)
    assert set(tree(tmp_path)) == {".final.partial-abc/inside"}


HOLD = """
import sys
from pathlib import Path
from tandem.base.run_folder import owned
with owned(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_told_whose_the_folder_is(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        told = rf"process {other.pid} on {socket.gethostname()}, since 20\d\d-"
        with pytest.raises(ConfigError, match=told), owned(tmp_path / "run"):
            pytest.fail("two owners")
        other.kill()
        other.wait()
        with owned(tmp_path / "run"):
            who = json.loads((tmp_path / "run" / ".tandem" / "owner.json").read_text())
            assert who["pid"] == os.getpid()
            with pytest.raises(ConfigError, match=str(os.getpid())), owned(tmp_path / "run"):
                pytest.fail("two owners")
    with owned(tmp_path / "run"):
        pass


@pytest.mark.parametrize("use", [begin, lambda folder: owned(folder).__enter__()], ids=["begin", "owned"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, use: Callable[[Path], object]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=rf"{tmp_path / 'file'}.*: can't be written \((Not a directory|File exists)\)"):
        use(tmp_path / "file" / "run")


def test_names_of_a_run() -> None:
    ours = ("final", "final.3", "config.yaml", "config.12.yaml", "checkpoints.1", "metrics.1.jsonl")
    users = ("final.old", "config.yml", "final.1.bak", "config.old.yaml", "my.final", "finals", "notes", ".final")
    assert all(map(run_folder.is_of_a_run, ours))
    assert not any(map(run_folder.is_of_a_run, users))
