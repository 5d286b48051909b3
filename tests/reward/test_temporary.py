"""What scoring processes start and leave: children that import the scorer's file, temporary files that are cleared."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.base.deadline import Deadline
from tandem.reward.outcome import Sample
from tandem.reward.process.inline import InlineScoring
from tandem.reward.process.pool import ScoringPool
from tandem.reward.resolve import bind, resolve
from tandem.reward.temporary import clear_left_over
from tests.reward.test_pool import until

SPAWNING = '''
import concurrent.futures, multiprocessing

class Scores:
    """Sent to other processes and back."""

    def __init__(self, value):
        self.value = value

def length(text):
    return Scores(float(len(text)))

def spread(response):
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(length, response).result(timeout=60).value
'''


def test_a_scorer_s_file_can_be_imported_by_the_processes_that_it_starts(tmp_path: Path) -> None:
    (tmp_path / "spreading.v2.py").write_text(SPAWNING)
    spec = resolve("spread", str(tmp_path / "spreading.v2.py"))
    with ScoringPool(spec, deadline_s=100.0) as pool:
        found = pool.collect(pool.submit([Sample("abc")]), Deadline(200))
    assert found.rewards == (3.0,), found.reasons


LITTERING = """
import os, tempfile, time
from tandem.reward.sandbox.run import Sandbox

def littering(response):
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write("left")
    if response == "program":
        Sandbox("limits", seconds=60.0).run("import time; time.sleep(60)", "")
    if response == "die":
        os._exit(3)
    return 1.0
"""


def test_a_scorer_that_is_killed_leaves_no_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its own nor those of the program that it was running."""
    (tmp_path / "littering.py").write_text(LITTERING)
    places = tmp_path / "places"
    places.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(places))
    with ScoringPool(resolve("littering", str(tmp_path / "littering.py")), deadline_s=2.0) as pool:
        handle = pool.submit([Sample("1"), Sample("program"), Sample("die"), Sample("2")])
        found = pool.collect(handle, Deadline(120))
        assert [str(outcome) for outcome in found.outcomes] == ["scored", "timed_out", "failed", "scored"]
    assert list(places.iterdir()) == []


def test_nor_does_one_whose_owner_is_killed(tmp_path: Path) -> None:
    (tmp_path / "littering.py").write_text(LITTERING)
    places = tmp_path / "places"
    places.mkdir()
    owner = (
        "import time\nfrom tandem.reward.process.pool import ScoringPool\nfrom tandem.reward.outcome import Sample\n"
        "from tandem.base.deadline import Deadline\nfrom tandem.reward.resolve import resolve\n"
        f"pool = ScoringPool(resolve('littering', {str(tmp_path / 'littering.py')!r}))\n"
        "pool.collect(pool.submit([Sample('1')]), Deadline(100)); print('scored', flush=True); time.sleep(100)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(places)}
    process = subprocess.Popen([sys.executable, "-c", owner], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "scored\n"
        assert len(list(places.iterdir())) == 1
        process.kill()
        process.wait()
    assert until(lambda: not list(places.iterdir()), 20)


def _runs_something(pid: int) -> bool:
    """Whether a child of the process has become another program, and so has let go of what it was forked with."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = Path(f"/proc/{pid}/cmdline").read_bytes()
    return any(Path(f"/proc/{child}/cmdline").read_bytes() not in (own, b"") for child in children)


def test_a_program_whose_run_is_killed_is_cleared_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scored in the run's own process, nobody else is there to clear it."""
    owner = "from tandem.reward.sandbox.run import Sandbox\nSandbox('limits', seconds=60.0).run('%s', '')"
    program = "import time; print(1, flush=True); time.sleep(60)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", owner % program], env=environment)
    assert until(lambda: bool(list(tmp_path.iterdir())), 60)
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    InlineScoring(bind(resolve("exact")))
    assert left.exists(), "its owner lives"
    assert until(lambda: _runs_something(process.pid), 60), "until then its child holds what it holds"
    process.kill()
    process.wait()
    os.utime(left, (0, 0))
    InlineScoring(bind(resolve("exact")))
    assert not left.exists()


@pytest.mark.parametrize("kind", ["scorer", "program"])
def test_the_next_pool_clears_what_nobody_holds_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    held, left, young = (tmp_path / f"tandem-{kind}-{name}" for name in ("held", "left", "young"))
    mine, link = tmp_path / "other", tmp_path / f"tandem-{kind}-link"
    for folder in (held, left, young, mine):
        folder.mkdir()
        (folder / "file").write_text("x")
    link.symlink_to(mine)
    for folder in (held, left, mine):
        os.utime(folder, (0, 0))
    os.utime(link, (0, 0), follow_symlinks=False)
    handle = os.open(held, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        clear_left_over()
    finally:
        os.close(handle)
    assert {path.name for path in tmp_path.iterdir()} == {held.name, young.name, mine.name, link.name}
    assert (mine / "file").read_text() == "x"
