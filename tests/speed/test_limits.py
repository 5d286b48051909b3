"""The best possible step: what must hold for any parts, and each formula on numbers."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ContractError
from tandem.speed.step_bound import Bound, Mode, Parts, Setting, best_step, perfect_step

SECONDS = st.floats(0.0, 100.0, allow_nan=False)
PARTS = st.builds(Parts, **{field.name: SECONDS for field in fields(Parts)})
MODES: tuple[Mode, ...] = ("colocate", "hybrid", "fully_async")
COUNT = st.integers(1, 64)
SETTINGS = st.builds(
    Setting,
    mode=st.sampled_from(MODES),
    rollout=COUNT,
    actor=COUNT,
    reference=COUNT,
    actor_fwd=COUNT,
    sub_batches=COUNT,
    staleness=st.integers(0, 4),
    overlap=st.booleans(),
    pipelined=st.booleans(),
    drains=st.booleans(),
    at_once=st.booleans(),
)
LESS = 1 - 1e-9  # sums in another order


@given(PARTS, SETTINGS)
def test_no_mode_beats_all_devices_busy_all_the_time(parts: Parts, setting: Setting) -> None:
    assert best_step(parts, setting).seconds >= perfect_step(parts, setting.devices) * LESS


@given(PARTS, SETTINGS, st.sampled_from([field.name for field in fields(Parts)]), SECONDS)
def test_no_part_may_grow_and_the_step_shrink(parts: Parts, setting: Setting, name: str, more: float) -> None:
    grown = replace(parts, **{name: getattr(parts, name) + more})
    assert best_step(grown, setting).seconds >= best_step(parts, setting).seconds * LESS


@given(
    PARTS,
    SETTINGS,
    st.sampled_from(["rollout", "actor", "reference", "actor_fwd", "sub_batches", "staleness"]),
    st.integers(1, 8),
)
def test_more_devices_sub_batches_or_staleness_never_make_a_step_longer(
    parts: Parts, setting: Setting, name: str, more: int
) -> None:
    changed: dict[str, Any] = {name: getattr(setting, name) + more}
    raised = replace(setting, **changed)
    assert best_step(parts, raised).seconds <= best_step(parts, setting).seconds / LESS


@given(PARTS, SETTINGS)
def test_the_binding_term_is_the_largest_and_adds_up(parts: Parts, setting: Setting) -> None:
    limit = best_step(parts, setting)
    assert limit.seconds == max(term.seconds for term in limit.terms)
    assert limit.bound is limit.binding.bound
    assert limit.binding.seconds * limit.binding.steps == pytest.approx(sum(limit.binding.addends.values()))


@given(PARTS, SETTINGS)
def test_pipelining_and_letting_generations_run_on_never_cost(parts: Parts, setting: Setting) -> None:
    for good, bad in (
        (replace(setting, pipelined=True), replace(setting, pipelined=False)),
        (replace(setting, drains=False), replace(setting, drains=True)),
    ):
        assert best_step(parts, good).seconds <= best_step(parts, bad).seconds / LESS


MEASURED = Parts(
    rollout=64, train=24, reference=8, old=4, advantages=0.5, turns=2, push=1, snapshot=0.25, broadcast=3, swap=0.125
)
# R = 8, F = 1.5, T = 3, A = 0.5 on 8 + 8 devices
HYBRID = Setting("hybrid", rollout=8, actor=8, sub_batches=2)


@pytest.mark.parametrize(
    ("setting", "seconds", "bound"),
    [
        (Setting("colocate", rollout=16), 4 + 0.75 + 0.5 + 1.5 + 2, Bound.TURNS),
        (HYBRID, 8 + 0.75 + 0.5 + 3 + 1, Bound.ROLLOUT),
        (replace(HYBRID, pipelined=True), 8 + (1.5 + 3) / 2 + 0.5 + 1, Bound.ROLLOUT),
        (replace(HYBRID, staleness=1), 8 + 1, Bound.ROLLOUT),
        (replace(HYBRID, staleness=1, rollout=32), 1.5 + 0.5 + 3 + 1, Bound.TRAIN),
        (replace(HYBRID, staleness=1, overlap=True), 8 + 0.125, Bound.ROLLOUT),
        (replace(HYBRID, staleness=1, overlap=True, rollout=32), 1.5 + 0.5 + 3 + 0.25, Bound.TRAIN),
        (
            Setting(
                "fully_async", rollout=16, actor=8, reference=1, actor_fwd=2, sub_batches=4, staleness=3, overlap=True
            ),
            8,
            Bound.FORWARD,
        ),
        (
            Setting("fully_async", rollout=16, actor=8, reference=2, actor_fwd=1, sub_batches=4, overlap=True),
            4 + 4 / 4 + 0.5 + 3 + 3.375,
            Bound.LATENCY,
        ),
        (
            Setting("fully_async", rollout=64, actor=8, reference=1, actor_fwd=1, sub_batches=4, overlap=True),
            1 / 4 + 8 + 0.5 + 3 + 3.375,
            Bound.FORWARD,
        ),
    ],
)
def test_each_formula(setting: Setting, seconds: float, bound: Bound) -> None:
    limit = best_step(MEASURED, setting)
    assert limit.seconds == pytest.approx(seconds)
    assert limit.bound is bound


def test_the_longest_sample_bounds_latency_and_where_generation_drains_throughput_too() -> None:
    tail, stale = replace(MEASURED, longest=20.0), replace(HYBRID, staleness=2)
    chain = 20 + 2 * 1 + 0.75 + 0.5 + 3 + 1  # the pushes of two more versions make it stand
    assert best_step(tail, stale).seconds == pytest.approx(max(9, chain / 3))
    assert best_step(tail, replace(stale, drains=True, at_once=True)).seconds == pytest.approx(20 + 1)
    # A sample that begins later may run beside the longest of the next partition.
    assert best_step(tail, replace(stale, drains=True)) == best_step(tail, stale)
    assert best_step(tail, HYBRID).seconds == pytest.approx(20 + 0.75 + 0.5 + 3 + 1)


def test_a_push_that_is_slower_than_the_step_binds() -> None:
    slow = replace(MEASURED, broadcast=12.0)
    limit = best_step(slow, replace(HYBRID, staleness=4, overlap=True))
    assert limit.bound is Bound.PUSH
    assert str(limit.binding) == "push-bound: snapshot 0.25 + broadcast 12 + swap 0.125 = 12.4 s"


def test_a_shared_chain_is_told_with_its_steps() -> None:
    told = str(best_step(replace(MEASURED, longest=20.0), replace(HYBRID, staleness=1)).binding)
    assert told.startswith("staleness-latency-bound: rollout 20 + earlier pushes 1 + forward / m 0.75")
    assert told.endswith("= 26.2 s shared by 2 steps = 13.1 s")


@pytest.mark.parametrize("wrong", [{"rollout": 0}, {"actor": 0}, {"sub_batches": 0}, {"staleness": -1}])
def test_a_setting_without_devices_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match="positive"):
        replace(HYBRID, **wrong)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_part_is_seconds(value: float) -> None:
    with pytest.raises(ContractError, match="swap"):
        replace(MEASURED, swap=value)
