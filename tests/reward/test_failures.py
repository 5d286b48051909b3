"""What is said of scorings that failed: at the first of each kind, and of all together with count and text."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.columns.proto import DataProto
from tandem.config.schema import RewardConfig
from tandem.reward.failures import Failures
from tandem.reward.outcome import PROCESS, Outcome, Scores, Verdict, as_verdict, failed, share_scored, timed_out
from tandem.roles.reward import build_reward_manager
from tests.roles.fake_roles import FakeTokenizer

VERDICTS = st.sampled_from(
    [Verdict(1.0), failed("KeyError: 'a' (s.py:3)"), failed("KeyError: 'b' (s.py:3)"), failed("None"), timed_out(2.0)]
)


@given(st.lists(st.lists(VERDICTS, min_size=1, max_size=5), max_size=6), st.integers(0, 6))
def test_every_scoring_is_counted_once_also_across_a_resume(groups: list[list[Verdict]], cut: int) -> None:
    every, first, second = Failures(), Failures(), Failures()
    for i, verdicts in enumerate(groups):
        every.add(Scores.of(verdicts, f"g{i}"))
        (first if i < cut else second).add(Scores.of(verdicts, f"g{i}"))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    flat = [verdict for verdicts in groups for verdict in verdicts]
    lost = sum(verdict.outcome is not Outcome.SCORED for verdict in flat)
    for counted in (every, second):
        assert (counted.total, counted.failed) == (len(flat), lost)
        assert str(counted).startswith(f"{len(flat) - lost} of {len(flat)} answers scored, {lost} without a reward")
        kinds = str(counted).partition(": ")[2].split("; ")
        assert sum(int(kind.split()[0]) for kind in kinds if kind) == lost
    assert str(every).count("KeyError") <= 1  # they differ in what is quoted only


def test_the_first_of_each_kind_is_told_at_once_and_the_end_counts(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    with caplog.at_level(logging.WARNING):
        failures.add(Scores.of([Verdict(1.0), failed("ValueError: bad 17 (s.py:4)")], "train_0/ticket_3"))
        failures.add(Scores.of([failed("ValueError: bad 18 (s.py:4)")] * 3 + [as_verdict(None)], "train_0/ticket_4"))
        failures.add(Scores.of([failed(f"{PROCESS} exited with status 3")], "train_0/ticket_5"))  # the pool's to tell
    first, second = (record.getMessage() for record in caplog.records)
    assert "no reward for train_0/ticket_3[1]: ValueError: bad 17 (s.py:4)" in first
    assert "train_0/ticket_4[3]: returned None, not a number (a wrong answer's is 0.0)" in second
    assert str(failures) == (
        "1 of 7 answers scored, 6 without a reward: 4 x ValueError: bad 17 (s.py:4); 1 x returned None, not a "
        "number (a wrong answer's is 0.0); 1 x the scoring process exited with status 3"
    )


def test_a_scorer_with_a_new_text_each_time_floods_nothing(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    words = ["".join(chr(97 + int(digit)) for digit in str(i)) for i in range(3000)]
    with caplog.at_level(logging.WARNING):
        for word in words:
            failures.add(Scores.of([failed(word)], "g"))
    assert len(caplog.records) == 5
    assert len(str(failures)) < 300 and failures.failed == 3000
    assert len(json.dumps(failures.state_dict())) < 60_000


def test_the_share_scored_stands_beside_the_mean() -> None:
    report = Scores.of([Verdict(1.0), Verdict(1.0), failed("x"), timed_out(1.0)], "g").report()
    assert share_scored(report) == {"scored_share": 0.5}
    assert share_scored({}) == share_scored({"scored": 0.0, "failed": 0.0, "timed_out": 0.0}) == {}


def test_a_loop_of_ones_own_is_told_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "picky.py").write_text(
        "made = []\ndef picky(response):\n    made.append(response)\n    return 1.0 if len(made) == 1 else None\n"
    )
    config = RewardConfig.model_validate({"type": "picky", "file": str(tmp_path / "picky.py")})
    manager = build_reward_manager(config, inline=True)
    batch = DataProto({"responses": [torch.tensor([i]) for i in range(3)]}, tokenizer=FakeTokenizer())
    with caplog.at_level(logging.WARNING):
        rewards = manager(batch)
        manager.close()
    assert rewards.isnan().tolist() == [False, True, True]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "returned None" in told[0]
    assert told[1].startswith("rewards: 1 of 3 answers scored, 2 without a reward: 2 x returned None")
