"""Staleness is bounded on what is trained; nothing is lost; a run ends with its cause and never hangs."""

from __future__ import annotations

import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import ContractError, DeadlineError, RewardError, StarvationError
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.control.entry import LOOPS, run_train
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.plan.plan import compile_plan
from tandem.reward.process.pool import ScoringPool
from tandem.reward.resolve import resolve
from tandem.stages.table import generate, score
from tests.e2e.seven import prepare, train
from tests.modes.gates import EventLog, SlowEngine, Streaming, streaming, with_engine

pytestmark = pytest.mark.usefixtures("warm_python")

MODES = ("hybrid", "fully_async")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("update", ["wait", "keep"])
def test_consumed_lag_is_bounded(task: Path, tmp_path: Path, mode: str, staleness: int, update: str) -> None:
    run = train(
        task,
        f"trainer.output_dir={tmp_path}",
        f"execution={{mode: {mode}, max_staleness: {staleness}, num_iters_per_train_update: 2}}",
        f"actor_rollout_ref.rollout.on_weight_update={update}",
        "trainer.total_steps=8",
        "data.train_batch_size=4",
    )
    lags = run.column("lag/max")
    assert len(lags) == 8 and max(lags) <= staleness
    assert max(lags) > 0 or staleness == 0
    status = run.session.plane.status()
    status.accounts.check()
    assert status.accounts.trained == 8 * 4 * 8


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_all_modes_learn(task: Path, tmp_path: Path, mode: str) -> None:
    execution = f"execution={{mode: {mode}, max_staleness: 1, num_iters_per_train_update: 4}}"
    run = train(task, f"trainer.output_dir={tmp_path}", execution)
    assert sum(run.rewards[:5]) / 5 < 0.4
    assert sum(run.rewards[-5:]) / 5 >= 0.7


@pytest.mark.parametrize("mode", MODES)
def test_b56_a_constant_reward_under_a_filter_ends_with_the_cause(task: Path, tmp_path: Path, mode: str) -> None:
    file = tmp_path / "constant.py"
    file.write_text("def constant(response):\n    return 1.0\n")
    with pytest.raises(StarvationError, match="equal rewards"):
        train(
            task,
            f"trainer.output_dir={tmp_path / 'run'}",
            f"execution.mode={mode}",
            "algorithm.filter_groups={enable: true, max_draws: 3}",
            f"reward_manager={{type: constant, file: {file}}}",
        )


@pytest.mark.parametrize("mode", MODES)
def test_an_error_in_a_loop_ends_the_run_with_it(task: Path, tmp_path: Path, mode: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def broken(response):\n    raise ValueError('no score for this')\n")
    with pytest.raises(RewardError, match="no score for this"):
        train(
            task,
            f"trainer.output_dir={tmp_path / 'run'}",
            f"execution.mode={mode}",
            f"reward_manager={{type: broken, file: {file}, on_error: stop}}",
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        ("mask", RewardError, r"not one of the 32 samples of step 1 .*ValueError: boom \(.*failing\.py:2\)"),
        ("refill", StarvationError, r"reward failed.*ValueError: boom \(.*failing\.py:2\)"),
    ],
)
def test_b56_a_reward_that_always_fails_ends_the_first_step_with_the_reason(
    task: Path, tmp_path: Path, mode: str, policy: str, error: type[Exception], message: str
) -> None:
    file = tmp_path / "failing.py"
    file.write_text("def failing(response):\n    raise ValueError('boom')\n")
    bound = ("algorithm.filter_groups.max_draws=3",) if policy == "refill" else ()
    words = (*bound, "data.train_batch_size=4")
    with pytest.raises(error, match=message):
        train(
            task,
            f"trainer.output_dir={tmp_path / 'run'}",
            f"execution={{mode: {mode}, num_iters_per_train_update: 2}}",
            f"reward_manager={{type: failing, file: {file}, on_error: {policy}}}",
            *words,
        )
    assert not read_rows(tmp_path / "run" / METRICS_FILE)


def scored_by(session: Streaming, folder: Path, body: str) -> ScoringPool:
    """A pool of one process, ready to score for the session."""
    file = folder / "scorer.py"
    file.write_text(f"import os, time\ndef scorer(response):\n    {body}\n")
    pool = ScoringPool(resolve("scorer", str(file)))
    pool.await_ready()
    session.rewards._scoring = pool
    return pool


@pytest.mark.parametrize("mode", MODES)
def test_a_scorer_that_always_ends_its_process_ends_the_run(task: Path, tmp_path: Path, mode: str) -> None:
    words = (f"execution={{mode: {mode}, deadline_s: 60}}", "data.train_batch_size=4", "trainer.total_steps=2")
    session = streaming(task, f"trainer.output_dir={tmp_path}", *words)
    with (
        scored_by(session, tmp_path, "os._exit(3)"),
        pytest.raises(RewardError, match=r"the scorer 'scorer' .* ended its process 8 times in a row.*status 3"),
        session.run.running(),
    ):
        LOOPS[mode](session)


@pytest.mark.parametrize("mode", ["colocate", *MODES])
def test_the_end_of_a_run_settles_its_accounts(
    task: Path, tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(task), f"trainer.output_dir={tmp_path}", f"execution.mode={mode}", "data.train_batch_size=4"]
    config = load_words([*words, "trainer.total_steps=2"], Config)
    assert run_train(config, compile_plan(config)) == 0
    told = "samples: produced 64, trained 64, dropped 0, left in the queue 0"
    assert told in capsys.readouterr().out.splitlines()
    assert told.removeprefix("samples: ") in (tmp_path / "report.html").read_text()
    session = prepare(*words, "trainer.total_steps=1")
    with pytest.raises(ContractError, match="not conserved: produced 33, trained 32"), session.run.running():
        LOOPS[mode](session)
        session.plane._ledger._produced += 1  # type: ignore[attr-defined]


class TestStalls:
    """The three causes of a stall, each provoked, each named in the warning and in the error after it."""

    @staticmethod
    def stalled(session: Streaming, caplog: pytest.LogCaptureFixture, partition: int = 0) -> tuple[str, str]:
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(DeadlineError) as error,
            session.rollout.working(generate, score),
        ):
            session.samples.next_groups(partition, 3, 2, "arrival")
        warnings = [record.getMessage() for record in caplog.records if "stalled" in record.getMessage()]
        session.rewards.close()
        return warnings[0], str(error.value)

    @pytest.fixture
    def session(self, task: Path, tmp_path: Path) -> Streaming:
        """Warns after half a second, gives up after one and a half."""
        execution = "{mode: hybrid, max_staleness: 1, stall_warning_s: 0.5, deadline_s: 1.5}"
        return streaming(task, f"trainer.output_dir={tmp_path}", f"execution={execution}", "data.train_batch_size=4")

    def test_partition_that_is_not_filled(
        self, session: Streaming, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def never(requests: Any, sampling: Any) -> Any:
            for _ in requests:
                time.sleep(0.05)
            yield from ()

        session.weights.push(0)
        monkeypatch.setattr(session.rollout.alive[0].engine, "generate", never)
        warning, error = self.stalled(session, caplog)
        assert warning.startswith("train_hybrid(rollout_id=0) batch_index=3 stalled for ")
        assert "4 of 4 groups unfilled" in warning and "rollout-0" in warning
        assert "4 of 4 groups unfilled" in error

    def test_scoring_that_hangs(self, session: Streaming, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        session.weights.push(0)
        with scored_by(session, tmp_path, "time.sleep(3600)") as pool:
            (process,) = pool.pids
            warning, error = self.stalled(session, caplog)
        for told in (warning, error):
            assert "4 of 4 groups unfilled, 4 of them generated: " in told
            assert "on engine 'rollout-0', generated, waits for rewards for " in told
            assert f"scoring: process {process} scores " in told and "jobs wait" in told

    def test_rollout_that_is_paused(self, session: Streaming, caplog: pytest.LogCaptureFixture) -> None:
        session.weights.push(0)
        session.rollout.gate.pause("rollout-0", "its health check failed")
        warning, error = self.stalled(session, caplog)
        assert "'rollout-0' is paused: its health check failed" in warning
        assert "its health check failed" in error

    def test_budget_of_staleness_that_is_used_up(self, session: Streaming, caplog: pytest.LogCaptureFixture) -> None:
        session.weights.push(0)
        warning, error = self.stalled(session, caplog, partition=2)
        assert "partition 2 needs version 1 published (max_staleness 1), 0 is; awaited from rollout-0" in warning
        assert "awaited from rollout-0" in error

    @pytest.mark.parametrize("silent_s", [0.0, 12.0])
    def test_groups_that_new_weights_wait_for(
        self, session: Streaming, caplog: pytest.LogCaptureFixture, silent_s: float
    ) -> None:
        class Endless(SlowEngine):
            def silent_s(self) -> float:
                return silent_s

        log, goes_on = EventLog(), threading.Event()
        with_engine(session, Endless(log, may_end=lambda ticket: ticket.place == 0 or goes_on.is_set()))
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(DeadlineError) as error,
            session.rollout.working(generate, score),
        ):
            session.weights.push(0)
            log.wait_for(lambda: log.happened("group 0.0"), "the first group")
            try:
                session.weights.push(1)
            finally:
                goes_on.set()
        session.rewards.close()
        (warning, *_) = (record.getMessage() for record in caplog.records if "stalled" in record.getMessage())
        quiet = " and gave no sign of life for 12 s" if silent_s else ""
        blocked = f"waits for weights version 1; blocked by rollout-0, which finishes its groups first{quiet}"
        assert re.match(r"train_hybrid\(rollout_id=0\) publishing version 1 stalled for [12] seconds: ", warning)
        assert blocked in warning
        assert "waited 1.5 s for rollout-0 to finish its groups before weights version 1" in str(error.value)
        assert ("gave no sign of life for 12 s" in str(error.value)) == bool(silent_s)


@pytest.mark.parametrize("mode", MODES)
def test_b68_a_killed_run_resumes_without_losing_or_repeating_a_prompt(task: Path, tmp_path: Path, mode: str) -> None:
    words = (
        task,
        f"trainer.output_dir={tmp_path}",
        f"execution={{mode: {mode}, max_staleness: 2, num_iters_per_train_update: 2}}",
        "trainer.total_epochs=4",
        "trainer.total_steps=null",
        "trainer.save_interval=1",
        "trainer.keep_checkpoints=9",
        "trainer.rollouts_per_step=99",
        "data.train_batch_size=4",
    )
    session = streaming(*words)

    class Killed(Exception):
        pass

    def until(step: int, batch: Any, update: Any) -> None:
        if step == 4:
            raise Killed
        type(session.run).end_step(session.run, step, batch, update)

    object.__setattr__(session.run, "end_step", until)
    with pytest.raises(Killed), session.run.running():
        LOOPS[mode](session)
    resumed = train(*words, "trainer.resume=auto")
    assert [row["step"] for row in resumed.rows] == list(range(1, 11))
    seen = [prompt for step in resumed.prompts for prompt in step]
    assert sorted(seen) == sorted(f"{d}>" for d in range(10) for _ in range(4))
