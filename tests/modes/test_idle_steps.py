"""Steps that train nothing are told at the first, and end the run with the reason where they go on."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tandem.base.errors import TandemError
from tandem.observe.metrics import METRICS_FILE, ROLLOUTS_FILE, read_rows
from tandem.session.idle import IdleSteps, why_idle
from tests.e2e.seven import train

SHORT = ("data.train_batch_size=4", "trainer.total_steps=9", "trainer.max_idle_steps=2")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("reward_manager.type=length_penalty", "reward_manager.target=100", "reward_manager.over=50"),
         "rewards of each group are all equal"),
    ],
)  # fmt: skip
def test_a_run_that_trains_nothing_again_and_again_ends_with_the_reason(
    task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, words: tuple[str, ...], why: str
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(TandemError, match=rf"3 steps in a row trained nothing, .*{why}.*max_idle_steps \(now 2\)"),
    ):
        train(task, *SHORT, *words, f"trainer.output_dir={tmp_path}")
    told = [record.message for record in caplog.records if "trained nothing" in record.message]
    assert len(told) == 1 and told[0].startswith("step 1 trained nothing: ") and why in told[0]
    assert len(read_rows(tmp_path / METRICS_FILE)) == 3


def test_a_step_that_trains_begins_the_count_anew() -> None:
    idle = IdleSteps()
    for step, applied in enumerate([False, False, True, False, False]):
        idle.note(step, applied, "x", 2)
    with pytest.raises(TandemError, match="3 steps in a row trained nothing, the last one because x"):
        idle.note(6, False, "x", 2)


def test_the_reason_is_the_nearest_one() -> None:
    quiet = {"reward/groups_without_signal": 4.0, "reward/excluded": 0.0, "length/max": 3.0, "length/truncated": 0.0}
    merely = why_idle(quiet | {"reward/mean": 0.25}, 4, masks_overlong=False)
    assert merely.startswith(
        "the rewards of each group are all equal, 0.25 on average: no fault where the task is merely"
    )
    assert "actor_rollout_ref.rollout.n" in merely
    assert "(2 samples count for nothing)" in why_idle(quiet | {"reward/excluded": 2.0}, 4, masks_overlong=False)
    assert why_idle(quiet | {"length/max": 0.0}, 4, masks_overlong=False) == "all answers are empty"
    assert "algorithm.overlong is mask" in why_idle(quiet | {"length/truncated": 1.0}, 4, masks_overlong=True)
    assert "not finite (grad/norm = nan)" in why_idle(quiet | {"grad/norm": float("nan")}, 4, masks_overlong=False)
    assert "every gradient was 0" in why_idle(quiet, 5, masks_overlong=True)


def test_a_sample_tells_the_versions_that_made_it(task: Path, tmp_path: Path) -> None:
    run = train(
        task,
        "execution={mode: hybrid, max_staleness: 2}",
        "trainer.total_steps=5",
        "trainer.rollouts_per_step=16",
        f"trainer.output_dir={tmp_path}",
    )
    records = read_rows(tmp_path / ROLLOUTS_FILE)
    lags = {step: [] for step in range(1, 6)}  # type: dict[int, list[int]]
    for row in records:
        step, oldest, newest = (int(str(row[key])) for key in ("step", "version", "version_max"))
        assert step - 1 - 2 <= oldest <= newest <= step - 1
        lags[step].append(step - 1 - oldest)
    assert [max(lags[step]) for step in lags] == [int(row["lag/max"]) for row in run.rows]
