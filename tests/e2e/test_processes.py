"""The command as a process: interrupted, ended, killed; what it leaves behind, and that it leaves nobody behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM

from tandem.observe.metrics import METRICS_FILE, read_rows
from tests.e2e.seven import equal, train

pytestmark = pytest.mark.usefixtures("warm_python")

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
BEGUN: list[subprocess.Popen[str]] = []
SMALL = ("data.train_batch_size=5", "actor_rollout_ref.rollout.n=4", "trainer.rollouts_per_step=5")


def begin(task: Path, folder: Path, *words: str) -> subprocess.Popen[str]:
    """A run without end whose scorer, in a process of its own, notes its process id."""
    scorer = folder / "noting.py"
    scorer.write_text(
        "import os\n"
        f"with open({str(folder / 'pids')!r}, 'a') as file:\n"
        "    file.write(f'{os.getpid()}\\n')\n\n\n"
        "def noting(response, ground_truth):\n"
        "    return sum(a == b for a, b in zip(response, ground_truth)) / 4\n"
    )
    command = [
        sys.executable, "-m", "tandem", "train", str(task), f"trainer.output_dir={folder / 'run'}", *SMALL, *words,
        "runtime.threads=false", "reward_manager.type=noting", f"reward_manager.file={scorer}",
        "trainer.total_steps=100000",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    BEGUN.append(process)
    return process


@pytest.fixture(autouse=True)
def end_of_all() -> Iterator[None]:
    """A run without end doesn't outlive a test that failed."""
    yield
    while BEGUN:
        BEGUN.pop().kill()


def wait_for(condition: Callable[[], object], what: str, process: subprocess.Popen[str] | None = None) -> None:
    """Poll, but not for ever."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{what} did not happen in {PATIENCE_S} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process is there and not merely waiting to be counted by its parent."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def nobody_is_left(folder: Path) -> None:
    pids = {int(pid) for pid in (folder / "pids").read_text().split()}
    assert len(pids) >= 2  # the run itself, which looks at the file, and the scoring process
    wait_for(lambda: not any(alive(pid) for pid in pids), f"the end of {pids}")


def test_b85_kill_9_loses_no_step_that_was_saved_and_leaves_nobody(task: Path, tmp_path: Path) -> None:
    process = begin(task, tmp_path, "trainer.save_interval=2")
    checkpoints = tmp_path / "run" / "checkpoints"
    wait_for(lambda: any(checkpoints.glob("step_*4")), "the checkpoint of step 4", process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    nobody_is_left(tmp_path)

    (*_, newest) = sorted(path for path in checkpoints.glob("step_*") if (path / "state.json").is_file())
    last = int(newest.name.removeprefix("step_")) + 2
    end = (*SMALL, f"trainer.total_steps={last}")
    resumed = train(
        task, f"trainer.output_dir={tmp_path / 'run'}", *end, "trainer.resume=auto", "trainer.save_interval=2"
    )
    whole = train(task, f"trainer.output_dir={tmp_path / 'whole'}", *end)
    assert [row["step"] for row in resumed.rows] == list(range(1, last + 1))
    assert equal(resumed.weights, whole.weights)
    assert resumed.prompts == whole.prompts
    assert set(Counter(prompt for step in resumed.prompts for prompt in step).values()) <= {last // 2, last // 2 + 1}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final") is not None


def test_b85_interrupted_from_the_keyboard(task: Path, tmp_path: Path) -> None:
    process = begin(task, tmp_path)
    wait_for(lambda: len(read_rows(tmp_path / "run" / METRICS_FILE)) >= 2, "two steps", process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert errors.splitlines()[-1].startswith("interrupted; ") and "go on with: tandem train" in errors
    assert "Traceback" not in errors
    assert "KeyboardInterrupt" in (tmp_path / "run" / "report.html").read_text()
    nobody_is_left(tmp_path)


MODES = {
    "colocate": "execution.mode=colocate",
    "hybrid": "execution={mode: hybrid, max_staleness: 2, num_iters_per_train_update: 5}",
}


@pytest.mark.parametrize("mode", MODES)
def test_b85_ended_by_a_supervisor(task: Path, tmp_path: Path, mode: str) -> None:
    process = begin(task, tmp_path, MODES[mode])
    wait_for(lambda: len(read_rows(tmp_path / "run" / METRICS_FILE)) >= 2, "two steps", process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 1 + (mode == "hybrid")  # a scoring process, and the engine's
    process.terminate()
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.splitlines()[-1].startswith("terminated; ") and "go on with: tandem train" in errors
    assert "Traceback" not in errors
    report = (tmp_path / "run" / "report.html").read_text()
    assert "Terminated" in report and "parts of a step" in report
    nobody_is_left(tmp_path)
    wait_for(lambda: not any(alive(child.pid) for child in children), f"the end of {children}")


def test_b85_kill_9_of_a_streaming_run_leaves_nobody(task: Path, tmp_path: Path) -> None:
    process = begin(task, tmp_path, MODES["hybrid"])
    wait_for(lambda: len(read_rows(tmp_path / "run" / METRICS_FILE)) >= 2, "two steps", process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(alive(child.pid) for child in children), f"the end of {children}")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("execution.max_stalenes=2", "max_staleness"),
        ("+trainer.total_step=5", "total_steps"),
        ("actor_rollout_ref.rollout.n='two'", "actor_rollout_ref.rollout.n"),
        ("--n-samples-per-promt=2", "n-samples-per-prompt"),
    ],
)
def test_b93_a_misspelt_key_is_an_error_with_the_nearest_name(task: Path, tmp_path: Path, word: str, told: str) -> None:
    command = [sys.executable, "-m", "tandem", "train", str(task), f"trainer.output_dir={tmp_path / 'run'}", word]
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert result.returncode == 2
    assert told in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("limit", "what"), [(300_000, "a model"), (700_000, "a checkpoint's tensors"), (3_000, "the first file of the run")]
)
def test_a_disk_without_room_is_told_and_no_success(task: Path, tmp_path: Path, limit: int, what: str) -> None:
    """A limit of file sizes stands for a full disk: the libraries that write have errors of their own for both."""
    words = [str(task), f"trainer.output_dir={tmp_path / 'run'}", *SMALL, "trainer.save_interval=2"]
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    command = [sys.executable, "-c", f"{code}; from tandem.cli.app import main; main()", "train", *words]
    # No bytecode: a limit of sizes would cut it, and the next import of it would fail.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == 1, what
    assert "no room is left to write to" in result.stderr and "Traceback" not in result.stderr, result.stderr
    if what == "a checkpoint's tensors":  # the model is smaller, and a limit of sizes leaves room for it
        assert f"The model of step 2 was written to {tmp_path / 'run-step-2'} instead" in result.stderr
    checkpoints = tmp_path / "run" / "checkpoints"
    assert not [folder for folder in checkpoints.glob("step_*") if (folder / "state.json").exists()]
