"""Scoring in processes: what a scorer may do to itself, it does to one sample only. Every wait ends."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tandem.base.deadline import Deadline
from tandem.base.errors import ContractError, DeadlineError, RewardError
from tandem.reward.outcome import Outcome, Sample
from tandem.reward.process.inline import InlineScoring
from tandem.reward.process.pool import ScoringPool
from tandem.reward.registry import register_reward
from tandem.reward.resolve import bind, resolve

FILE = str(Path(__file__).with_name("faulty_scorers.py"))
SCORED, FAILED, TIMED_OUT = Outcome.SCORED, Outcome.FAILED, Outcome.TIMED_OUT


def samples(*responses: str, **fields) -> list[Sample]:
    return [Sample(response, **fields) for response in responses]


def alive(pid: int) -> bool:
    """Whether the process runs: a zombie of another parent doesn't."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def until(condition, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(scope="module")
def pool():
    with ScoringPool(resolve("obedient", FILE), workers=2, deadline_s=1.0) as opened:
        yield opened


def score(pool, *responses: str, label: str = "group", **fields):
    return pool.collect(pool.submit(samples(*responses, **fields), label), Deadline(30))


def test_groups_are_collected_in_any_order(pool) -> None:
    handles = [pool.submit(samples(*map(str, range(i, i + 8))), f"g{i}") for i in range(40)]
    for i in reversed(range(40)):
        scores = pool.collect(handles[i], Deadline(30))
        assert scores.rewards == tuple(float(x) for x in range(i, i + 8))
        assert scores.names[3] == f"g{i}[3]"


def test_an_empty_group_is_done_at_once(pool) -> None:
    handle = pool.submit([])
    assert handle.done
    assert len(pool.collect(handle, Deadline(1))) == 0


def test_b76_one_of_eight_sleeps_for_ever(pool) -> None:
    before = pool.pids
    scores = score(pool, "1", "2", "3", "sleep", "5", "6", "7", "8")
    assert scores.outcomes == (SCORED,) * 3 + (TIMED_OUT,) + (SCORED,) * 4
    assert scores.rewards[4:] == (5.0, 6.0, 7.0, 8.0)
    assert scores.reasons[3] == "not scored within 1 s"
    assert len(pool.pids) == len(before) == 2
    assert len(set(before) - set(pool.pids)) == 1
    assert score(pool, "1", "2").rewards == (1.0, 2.0)


def test_b76_a_scorer_that_holds_the_interpreter_is_ended_too(pool) -> None:
    assert score(pool, "regex", "2").outcomes == (TIMED_OUT, SCORED)


def test_b76_all_of_a_group_may_hang(pool) -> None:
    assert score(pool, "sleep", "sleep", "sleep").outcomes == (TIMED_OUT,) * 3
    assert len(pool.pids) == 2


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("exit 7", "exited with status 7"),
        ("exit 0", "exited with status 0"),
        ("segfault", "killed by SIGSEGV"),
        ("die", "killed by SIGKILL"),
        ("quit", "SystemExit: 3"),
        ("raise", "ValueError: the row"),
        ("none", "returned None"),
        ("text", "returned str '1.0'"),
        ("nan", "not a finite number"),
        ("lambda", "type function"),
    ],
)
def test_b75_what_goes_wrong_fails_its_sample_with_the_reason(pool, response, reason) -> None:
    scores = score(pool, "1", response, "3", ground_truth="the row")
    assert scores.outcomes == (SCORED, FAILED, SCORED)
    assert reason in scores.reasons[1]
    assert scores.report() == {"scored": 2.0, "failed": 1.0, "timed_out": 0.0}
    assert len(pool.pids) == 2


def test_b75_an_error_names_the_line_of_the_scorer(pool) -> None:
    assert "faulty_scorers.py:" in score(pool, "raise").reasons[0]


def test_b75_the_pool_works_from_any_thread(pool) -> None:
    found = {}

    def ask(i: int) -> None:
        found[i] = score(pool, str(i), label=f"t{i}").rewards

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {i: (float(i),) for i in range(6)}


def test_b75_math_is_scored_in_processes() -> None:
    with ScoringPool(resolve("math"), deadline_s=60) as math_pool:
        group = [Sample(r"\boxed{\frac{1}{2}}", "0.5"), Sample(r"\boxed{3}", "0.5"), Sample("x", "")]
        scores = math_pool.collect(math_pool.submit(group), Deadline(100))
    assert scores.rewards[:2] == (1.0, 0.0)
    assert scores.outcomes == (SCORED, SCORED, FAILED)


def test_a_worker_killed_from_outside_fails_one_sample(pool) -> None:
    handle = pool.submit(samples("sleep 0.3", "2", "3", "4"))
    assert until(lambda: any(p.jobs for p in pool._processes))  # not one that is starting: it holds nothing
    busy = next(p for p in pool._processes if p.jobs)
    os.kill(busy.pid, signal.SIGKILL)
    scores = pool.collect(handle, Deadline(30))
    assert sorted(scores.outcomes) == sorted([FAILED, SCORED, SCORED, SCORED])
    assert "killed by SIGKILL" in "".join(scores.reasons)
    assert score(pool, "5").rewards == (5.0,)


def test_an_idle_worker_killed_from_outside_is_replaced(pool) -> None:
    score(pool, "1")
    killed = pool.pids[0]
    os.kill(killed, signal.SIGKILL)
    assert until(lambda: killed not in pool.pids and len(pool.pids) == 2)
    assert score(pool, *"12345678").rewards == tuple(map(float, range(1, 9)))


def test_what_cannot_be_sent_fails_its_sample(pool) -> None:
    scores = pool.collect(pool.submit([Sample("1"), Sample("2", lambda: 0)]), Deadline(30))
    assert scores.outcomes == (SCORED, FAILED)
    assert "can't be sent" in scores.reasons[1]


def test_workers_are_apart_from_this_process_and_have_no_torch(pool) -> None:
    scores = score(pool, "pid", "torch")
    assert int(scores.rewards[0]) != os.getpid()
    assert scores.rewards[1] == 0.0


def test_a_collect_that_ends_early_says_who_blocks(pool) -> None:
    handle = pool.submit(samples("sleep 0.4"), "train_3/ticket_5")
    with pytest.raises(DeadlineError, match=r"the rewards of train_3/ticket_5\[0\]; blocked by process \d+"):
        pool.collect(handle, Deadline(0.05))
    assert pool.collect(handle, Deadline(30)).outcomes == (SCORED,)


def test_async_scorers_wait_together_and_fail_alone() -> None:
    with ScoringPool(resolve("awaiting", FILE), workers=1, deadline_s=0.5) as pool:
        score(pool, "x")
        scores = score(pool, "a", "hang", *["abc"] * 10)
        assert scores.outcomes == (SCORED, TIMED_OUT) + (SCORED,) * 10
        first = pool.pids
        assert score(pool, "block", "ab").outcomes == (TIMED_OUT, SCORED)
        assert len(pool.pids) == 1
        assert pool.pids != first


@pytest.mark.parametrize("workers", [1, 2])
def test_a_scorer_that_always_ends_its_process_ends_the_pool(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    message = rf"the scorer 'obedient' of {FILE} ended its process 8 times in a row, and nothing was scored.*status 3"
    with ScoringPool(resolve("obedient", FILE), workers=workers, deadline_s=20) as pool:
        handle = pool.submit(samples(*["exit 3"] * 40), "g")
        with pytest.raises(RewardError, match=message):
            pool.collect(handle, Deadline(60))
        with pytest.raises(RewardError, match=message):
            pool.check()
        assert not handle.done
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "no reward for g[" in warning and "exited with status 3" in warning and "reward/failed" in warning


def test_a_scorer_that_has_scored_may_end_many_processes() -> None:
    with ScoringPool(resolve("obedient", FILE), deadline_s=20) as pool:
        scores = score(pool, "1", *["exit 3"] * 9, "2")
        pool.check()
    assert scores.outcomes == (SCORED, *[FAILED] * 9, SCORED)


def test_a_scorer_that_cannot_be_made_is_told_and_nothing_waits() -> None:
    with ScoringPool(resolve("unmakeable", FILE), workers=1) as pool:
        with pytest.raises(RewardError, match="the scorer can't be made: OSError: no such judge"):
            pool.await_ready()
        with pytest.raises(RewardError, match="the scorer can't be made: OSError: no such judge"):
            pool.collect(pool.submit(batch("a"), "g"), Deadline(60))
        with pytest.raises(RewardError, match="nothing can be scored"):
            pool.submit(batch("a"))


def test_processes_that_are_not_ready_in_time_are_told() -> None:
    with (
        ScoringPool(resolve("obedient", FILE), start_s=0.01) as pool,
        pytest.raises(RewardError, match=r"3 scoring processes .*; the last one didn't get ready in 0\.01 s"),
    ):
        pool.await_ready()


def test_processes_that_never_start_are_told() -> None:
    with (
        ScoringPool(resolve("dying", FILE), workers=1) as pool,
        pytest.raises(
            RewardError, match="3 scoring processes in a row didn't start; the last one exited with status 9"
        ),
    ):
        pool.collect(pool.submit(batch("a")), Deadline(60))


def test_a_closed_pool_has_no_processes_and_refuses_work() -> None:
    pool = ScoringPool(resolve("obedient", FILE), workers=2)
    handle = pool.submit(samples("sleep"))
    pids = pool.pids
    pool.close()
    pool.close()
    assert until(lambda: not any(alive(pid) for pid in pids), 5)
    with pytest.raises(RewardError, match="closed"):
        pool.collect(handle, Deadline(5))
    with pytest.raises(RewardError, match="closed"):
        pool.submit(samples("1"))


def batch(*texts: str, **columns):
    import torch

    from tandem.columns.proto import DataProto
    from tests.reward.letters import LetterTokenizer

    rows = [torch.tensor([ord(letter) for letter in text], dtype=torch.int64) for text in texts]
    return DataProto({"responses": rows}, columns, tokenizer=LetterTokenizer())


def test_a_manager_scores_batches_and_wrong_ones_fail_whole() -> None:
    from tests.reward.letters import LetterTokenizer

    spec = resolve("decoding", FILE, {"keyword": "正"})
    with ScoringPool(spec, workers=1, deadline_s=3.0, tokenizer=LetterTokenizer()) as pool:
        handles = [pool.submit(batch(*texts)) for texts in [("回答正确", "wrong"), ("nan", "正"), ("a", "b", "c")]]
        two, one_bad, too_few = (pool.collect(handle, Deadline(60)) for handle in handles)
        assert two.rewards == (1.0, 0.0)
        assert one_bad.outcomes == (FAILED, SCORED)
        assert too_few.outcomes == (FAILED,) * 3
        assert too_few.reasons[0] == "returned 2 rewards for 3 samples"
        late = pool.submit(batch("正", "hang"))
        assert pool.collect(late, Deadline(60)).outcomes == (TIMED_OUT,) * 2
        with pytest.raises(ContractError, match="submit a DataProto"):
            pool.submit(samples("a"))


def test_functions_read_samples_out_of_a_batch(pool) -> None:
    data = batch("1", "", "raise", ground_truth=["x", "y", "z"])
    scores = pool.collect(pool.submit(data), Deadline(30))
    assert scores.rewards[:2] == (1.0, 1.0)
    assert scores.reasons[2].startswith("ValueError: z")


def test_a_sum_may_mix_managers_and_functions() -> None:
    parts = [{"type": "decoding", "file": FILE}, {"type": "length_penalty", "weight": 2, "target": 0, "over": 4}]
    scorer = bind(resolve("weighted_sum", None, {"parts": parts}))
    with InlineScoring(scorer) as scoring:
        scores = scoring.collect(scoring.submit(batch("7", "12")), Deadline(1))
    assert scores.rewards == (1.0 - 2 * 0.25, 0.0 - 2 * 0.5)
    assert scores.metrics[1] == {"decoding": 0.0, "length_penalty": -0.5}
    assert scores.components == ((1.0, -0.5), (0.0, -1.0))


def test_components_come_back_from_a_process() -> None:
    parts = [{"type": "obedient", "file": FILE}, {"type": "length_penalty", "weight": -2, "target": 0, "over": 4}]
    with ScoringPool(resolve("weighted_sum", None, {"parts": parts}), deadline_s=5.0) as summing:
        scores = score(summing, "3", "raise", response_length=2)
    assert scores.components == ((3.0, 1.0), ())


def test_inline_scores_the_same_without_processes() -> None:
    scoring = InlineScoring(bind(resolve("obedient", FILE)))
    scores = scoring.collect(scoring.submit(samples("1", "raise", "nan")), Deadline(1))
    assert scores.outcomes == (SCORED, FAILED, FAILED)


# --- ends of the owner ------------------------------------------------------------------------------------------------

OWNER = """
    import sys, time
    from tandem.reward.outcome import Sample
    from tandem.reward.process.pool import ScoringPool
    from tandem.reward.resolve import resolve
    pool = ScoringPool(resolve("obedient", {file!r}), workers=3, deadline_s=1.0)
    pool.submit([Sample("1")])
    while not all(p.ready for p in pool._processes): time.sleep(0.01)
    pool.submit([Sample("child {pids}")])
    while not any(p.jobs for p in pool._processes): time.sleep(0.01)
    pool.submit([Sample("regex")])
    while sum(bool(p.jobs) for p in pool._processes) < 2: time.sleep(0.01)
    print(*pool.pids, flush=True)
    {then}
"""


def owner(tmp_path: Path, then: str) -> subprocess.Popen[str]:
    """A script without a main guard that owns a pool with an idle, a busy and an unstoppable process."""
    script = tmp_path / "owner.py"
    script.write_text(textwrap.dedent(OWNER).format(file=FILE, pids=tmp_path / "pids", then=then))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, None])
def test_b85_no_process_outlives_the_owner(tmp_path, end) -> None:
    process = owner(tmp_path, "" if end is None else "time.sleep(60)")
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3
    if end is not None:
        assert until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())
        pids += [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        process.send_signal(end)
    process.wait(20)
    process.stdout.close()
    assert until(lambda: not any(alive(pid) for pid in pids), 15)


def test_a_scorer_of_the_running_script_is_refused_with_a_remedy(monkeypatch) -> None:
    @register_reward("of_the_script")
    def of_the_script(response: str) -> float:
        return 1.0

    spec = resolve("of_the_script")
    with pytest.raises(RewardError, match=r"'of_the_script' is defined in the script that runs.* file: FILE"):
        ScoringPool(dataclasses.replace(spec, module="__main__"))
