"""What every step tells of itself, and what is said at the end, in each mode."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cli.app import app
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.session.rollout import Workers
from tests.e2e.seven import train, write_rows

STREAMING = {
    "hybrid": "{mode: hybrid, max_staleness: 1, num_iters_per_train_update: 4}",
    "hybrid, pipelined": "{mode: hybrid, max_staleness: 0, num_iters_per_train_update: 2, train_pipelining: step}",
    "hybrid, overlapped": "{mode: hybrid, max_staleness: 2, weight_sync: {overlap: true}}",
    "fully async": "{mode: fully_async, max_staleness: 1, num_iters_per_train_update: 2}",
}
EXECUTIONS = {"colocate": "{mode: colocate}", **STREAMING}
STEPS, SAMPLES = 8, 4 * 8


@pytest.fixture(scope="module", params=EXECUTIONS)
def told(request: pytest.FixtureRequest, task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, str]:
    """(mode, rows of metrics.jsonl, what the command printed) of a run with a reference."""
    folder = tmp_path_factory.mktemp("reports")
    words = ("algorithm.kl={in: loss, coef: 0.01}", "data.train_batch_size=4", f"trainer.total_steps={STEPS}")
    execution = f"execution={EXECUTIONS[request.param]}"
    result = CliRunner().invoke(app, ["train", str(task), execution, f"trainer.output_dir={folder}", *words])
    assert result.exit_code == 0, result.output
    report = (folder / "report.html").read_text()
    assert "of the best possible" in report and "parts of a step" in report
    return request.param, read_rows(folder / METRICS_FILE), result.output


def test_every_step_has_its_parts_its_limit_and_its_lags(told: tuple[str, Any, str]) -> None:
    mode, rows, _ = told
    parts = ["rollout", "ref", "advantages", "train", "publish"]
    parts += ["wait", "push_wait", "push_health", "push_snapshot"] if mode in STREAMING else ["turns"]
    for row in rows:
        assert [row[f"time/{part}"] >= 0 for part in parts] == [True] * len(parts)
        assert row["limit/fraction"] == pytest.approx(row["limit/step_s"] / row["time/step"])
        assert row["limit/step_s"] > 0
        lags = {int(key.removeprefix("lag/count_")): row[key] for key in row if key.startswith("lag/count_")}
        assert sum(lags.values()) == SAMPLES
        assert sum(lag * count for lag, count in lags.items()) / SAMPLES == pytest.approx(row["lag/mean"])
        assert (row["reward/scored"], row["version"]) == (SAMPLES, row["step"])
    assert all(row.get("rollout/longest_s", 0) > 0 for row in rows) == (mode in STREAMING)


def test_the_last_lines_tell_the_parts_and_the_fraction_of_the_limit(told: tuple[str, Any, str]) -> None:
    mode, _, printed = told
    (step,) = re.findall(r"^step: ([\d.e-]+) s, ([\d.]+) of the best possible \((.+): (.+) s\)$", printed, re.MULTILINE)
    assert float(step[0]) > 0 and float(step[1]) > 0
    (parts,) = re.findall(r"^parts of a step: (.+) s \(means of \d+ steps\)$", printed, re.MULTILINE)
    named = dict(part.rsplit(" ", 1) for part in parts.split(", "))
    assert {"rollout", "ref", "advantages", "train", "publish"} <= named.keys()
    assert ("wait" in named) == (mode in STREAMING)
    assert re.search(r"^lag: [\d.]+ versions on average, \d at most$", printed, re.MULTILINE)


def test_what_is_generated_beside_an_evaluation_is_no_part_of_a_step(task: Path, tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "val.jsonl", [{"prompt": "3>", "answer": "3333"}])
    evaluation = (f"data.val_files=[{held_out}]", "data.drop_val_prompts=false", "evaluation.interval=1")
    words = ("execution.mode=hybrid", "data.train_batch_size=4", "trainer.total_steps=4", "trainer.save_interval=2")
    run = train(task, f"trainer.output_dir={tmp_path / 'run'}", *evaluation, *words)
    assert isinstance(run.session.rollout, Workers)
    assert 0 < sum(run.column("time/rollout")) <= sum(run.column("rollout/work_s")) + 1e-9
    assert sum(run.column("time/rollout")) <= run.session.rollout.clock() <= sum(run.column("time/step"))
    assert all(row["time/push_drain"] >= 0 and row["time/evaluation"] > 0 for row in run.rows)


@pytest.mark.parametrize("old", ["rollout", "auto"])
def test_a_stale_engine_is_seen_beside_the_trainer_whatever_the_old_logprobs_are(
    task: Path, tmp_path: Path, old: str
) -> None:
    run = train(
        task,
        "execution={mode: hybrid, max_staleness: 1}",
        f"algorithm.old_logprobs={old}",
        "actor_rollout_ref.actor.optim.lr=0.02",
        "trainer.total_steps=4",
        f"trainer.output_dir={tmp_path}",
    )
    assert max(run.column("lag/max")) == 1
    seen = run.column("mismatch/abs")
    assert len(seen) == 4 and seen[0] < 1e-5 < 1e-2 < max(seen)
    assert max(run.column("mismatch/k3")) > 1e-4
    assert max(run.column("mismatch/abs_same")) < 1e-5 < 1e-2 < max(run.column("mismatch/abs_older"))
    assert "mismatch/abs_older" not in run.rows[0] and len(run.column("entropy/mean")) == 4
