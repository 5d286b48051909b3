"""Rewards that a step waits for are named: not generation, which is long over by then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.dataflow.tickets import Ticket
from tandem.roles.rollout.utilization import ScoringWait, Utilization
from tandem.speed.measured import STEP, parts_of, setting_of, step_summary, timed_steps
from tandem.speed.step_bound import Bound, Parts, Setting, best_step
from tests.e2e.conftest import task
from tests.e2e.seven import train

__all__ = ["task"]

SLOW = "import time\n\ndef slow(response, ground_truth):\n    time.sleep(0.5)\n    return float(len(response) % 3)\n"


class Clock:
    """Seconds that the test moves on."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_only_what_no_generation_hides_is_waited_for() -> None:
    clock = Clock()
    wait = ScoringWait(clock)
    wait.generates("a", 1)
    wait.generates("b", 2)
    wait.scores(1)
    clock.now = 1.0
    wait.generates("a", -1)
    clock.now = 3.0
    assert wait.look() == 0.0  # b is at work
    with wait.blocking("b"):
        clock.now = 3.25
        assert wait.blocked_s("b") == pytest.approx(0.25)
        clock.now = 3.5
    assert wait.blocked_s("b") == pytest.approx(0.5) and wait.blocked_s("a") == 0.0
    wait.generates("b", -2)
    clock.now = 5.0
    wait.scores(-1)
    clock.now = 9.0
    assert wait.look() == pytest.approx(2.0)


def test_a_push_is_no_wait_for_scores() -> None:
    clock = Clock()
    wait = ScoringWait(clock)
    wait.scores(1)
    clock.now = 1.0
    with wait.pushing():
        clock.now = 4.0
    clock.now = 4.5
    assert wait.look() == pytest.approx(1.5)


def test_no_moment_is_both_generation_and_a_wait_for_scores() -> None:
    clock, ticket = Clock(), Ticket(0, 0)
    wait = ScoringWait(clock)

    def note(change: int) -> None:
        clock.now += 1.0  # another thread has its turn between the two readings of one event
        wait.generates("a", change)

    use = Utilization(clock, note)
    wait.scores(1)
    use.begin(ticket)
    clock.now += 5.0
    assert wait.look() + use.look()[0] == pytest.approx(6.0)
    use.end(ticket)
    clock.now += 2.0
    assert wait.look() + use.look()[0] <= 3.0


@pytest.mark.parametrize(
    "setting",
    [
        Setting("colocate", rollout=1),
        Setting("hybrid", rollout=1, actor=1),
        Setting("hybrid", rollout=1, actor=1, staleness=1),
        Setting("hybrid", rollout=1, actor=1, staleness=1, overlap=True),
        Setting("fully_async", rollout=1, actor=1, actor_fwd=1, staleness=1),
        Setting("fully_async", rollout=1, actor=1, actor_fwd=1),
    ],
    ids=str,
)
def test_slow_rewards_bind_and_are_called_so(setting: Setting) -> None:
    slow, fast = Parts(rollout=1.0, train=1.0, rewards=9.0), Parts(rollout=9.0, train=1.0, rewards=1.0)
    assert best_step(slow, setting).bound is Bound.REWARDS
    assert "rewards 9" in str(best_step(slow, setting).binding)
    assert best_step(fast, setting).bound is not Bound.REWARDS
    assert best_step(slow, setting).seconds >= 9.0


@pytest.mark.parametrize("threads", ["true", "false"])
@pytest.mark.parametrize("mode", ["colocate", "hybrid"])
def test_a_run_says_that_it_waits_for_scores(task: Path, tmp_path: Path, mode: str, threads: str) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    run = train(
        task, "data.train_batch_size=2", "actor_rollout_ref.rollout.n=2", "trainer.total_steps=6",
        "reward_manager.type=slow", f"reward_manager.file={tmp_path / 'slow.py'}", f"execution.mode={mode}",
        f"runtime.threads={threads}", f"trainer.output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    setting, rows = setting_of(run.session.config), timed_steps(run.output)
    told = step_summary(run.output, setting)
    assert "(reward-bound: " in told["step"] and ", reward " in told["parts of a step"]
    parts = parts_of(rows, setting)
    assert parts.rewards > parts.rollout
    # No moment is in two parts of a step, whichever thread has its turn when: what is left are roundings of sums.
    assert best_step(parts, setting).seconds <= sum(float(str(row[STEP])) for row in rows) / len(rows) + 1e-6
