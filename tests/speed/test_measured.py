"""The parts of measured steps: what goes on side by side is counted once, and only of this part of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.observe.metrics import METRICS_FILE
from tandem.speed.measured import parts_of, step_summary
from tandem.speed.step_bound import Mode, Setting, best_step

SECONDS = st.floats(0.0, 10.0)
WAIT = Setting("hybrid", rollout=1, actor=1, staleness=1, drains=True)

# A step of a run in which every push waits for what is being generated.
DRAINED = {
    "time/step": 0.50,
    "time/wait": 0.05,
    "time/train": 0.03,
    "time/publish": 0.42,
    "time/push_health": 0.02,
    "time/push_snapshot": 0.06,
    "time/push_drain": 0.24,
    "time/push_transfer": 0.09,
    "time/push_apply": 0.01,
    "time/rollout": 0.37,
    "rollout/longest_s": 0.31,
}


def test_the_wait_for_generation_is_no_part_of_the_push() -> None:
    parts = parts_of([DRAINED], WAIT)
    assert parts.push == pytest.approx(0.18)
    assert parts.broadcast + parts.swap == pytest.approx(0.10)
    assert parts.rollout == pytest.approx(0.37 - 0.08)  # it went on until the weights had arrived
    assert best_step(parts, WAIT).seconds == pytest.approx(0.29 + 0.18)  # generation, and the push


def test_at_staleness_0_nothing_is_generated_beside_a_push() -> None:
    fresh = Setting("hybrid", rollout=1, actor=1)
    row = {"time/step": 0.5, "time/train": 0.1, "time/publish": 0.2, "time/rollout": 0.2}
    assert best_step(parts_of([row], fresh), fresh).seconds == pytest.approx(0.5)


@given(
    mode=st.sampled_from(("hybrid", "fully_async")),
    on_update=st.sampled_from(("wait", "keep", "abort")),
    staleness=st.integers(1, 4),
    loop=st.tuples(SECONDS, SECONDS, SECONDS),
    push=st.tuples(SECONDS, SECONDS, SECONDS, SECONDS),
    busy=st.floats(0.0, 1.0),
    longest=st.floats(0.0, 1.0),
)
def test_no_steady_step_is_shorter_than_its_limit(
    mode: Mode,
    on_update: Literal["wait", "keep", "abort"],
    staleness: int,
    loop: tuple[float, float, float],
    push: tuple[float, float, float, float],
    busy: float,
    longest: float,
) -> None:
    """The actor does one thing after the other; beside it an engine is at work, but for pushes that it waits for."""
    (wait, advantages, train), (snapshot, drain, transfer, apply) = loop, push
    drains = on_update == "wait"
    publish = snapshot + drain * drains + transfer + apply
    step = wait + advantages + train + publish
    rollout = busy * (step - (transfer + apply if drains else 0.0))
    row = {
        "time/step": step,
        "time/advantages": advantages,
        "time/train": train,
        "time/publish": publish,
        "time/push_snapshot": snapshot,
        "time/push_drain": drain * drains,
        "time/push_transfer": transfer,
        "time/push_apply": apply,
        "time/rollout": rollout,
        "rollout/longest_s": longest * rollout,
    }
    apart = {"actor_fwd": 1} if mode == "fully_async" else {}
    setting = Setting(mode, rollout=1, actor=1, staleness=staleness, drains=drains, **apart)
    assert best_step(parts_of([row], setting), setting).seconds <= step * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(("overlap", "longest"), [(False, 3.0), (True, 2.0)])
def test_with_overlapped_pushes_the_longest_group_is_the_partitions(overlap: bool, longest: float) -> None:
    row = {"time/step": 4.0, "time/train": 1.0, "rollout/longest_ended_s": 3.0, "rollout/longest_s": 2.0}
    setting = Setting("hybrid", rollout=1, actor=1, staleness=1, drains=True, overlap=overlap)
    assert parts_of([row], setting).longest == longest


def test_after_a_resume_in_another_mode_only_its_own_steps_are_told(tmp_path: Path) -> None:
    before = {"time/step": 9.0, "time/rollout": 9.0, "time/train": 9.0, "lag/mean": 1.0, "lag/max": 2.0}
    after = {"time/step": 3.0, "time/rollout": 2.0, "time/train": 0.5, "lag/mean": 0.0, "lag/max": 0.0}
    rows = [*[before] * 6, {**after, "limit/resumed_after": 6.0}, *[after] * 6]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = step_summary(tmp_path, Setting("colocate", rollout=1))
    assert told["step"].startswith("3 s, 0.83 of the best possible")
    assert told["parts of a step"].endswith("(means of 5 steps)")
    assert told["lag"] == "0.00 versions on average, 0 at most"
