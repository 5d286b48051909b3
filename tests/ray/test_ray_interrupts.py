"""A signal while a run is on Ray: its processes end, what is done is kept, and the run goes on elsewhere."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import pytest

from tandem.base import interrupts
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.roles.actor import Actor
from tandem.train import saved
from tests.e2e.conftest import task
from tests.e2e.interrupting import Instant, interrupted_at, run

__all__ = ["task"]

WORDS = (
    "execution={mode: hybrid, max_staleness: 1}", "runtime.name=ray", "runtime.threads=false", "trainer.total_steps=3",
    "data.train_batch_size=4", "actor_rollout_ref.rollout.n=8", "trainer.save_interval=2",
)  # fmt: skip
INSIDE_A_SAVE: Instant = (Actor, "save", 1, 2)


def test_a_run_on_ray_is_interrupted_as_any_other(
    cluster: None, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "_PATIENCE_S", 600.0)
    with monkeypatch.context() as patched:
        interrupted_at(INSIDE_A_SAVE, signal.SIGTERM, patched)
        result = run("train", str(task), *WORDS, f"trainer.output_dir={tmp_path}")
    assert result.exit_code == 143, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("terminated")]
    assert [step for step, _ in saved.checkpoints_in(tmp_path / "checkpoints")][-1] == 2
    again = shlex.split(line.partition("with: ")[2])
    result = run(*again[1:], "runtime.name=local")
    assert result.exit_code == 0, result.output
    assert [row["step"] for row in read_rows(tmp_path / METRICS_FILE)] == [1, 2, 3]
