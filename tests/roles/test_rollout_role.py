"""The rollout role: tickets become groups, whatever order they finish in and however often scoring fails."""

from __future__ import annotations

import random
from collections import Counter
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import DeadlineError, RewardError, StarvationError
from tandem.base.seeding import derive_seed
from tandem.columns.proto import DataProto
from tandem.reward.outcome import Outcome, Verdict, failed
from tandem.roles.rollout.filling import FAILED, FILTERED
from tests.roles.fake_roles import LENGTH, FakeEngine, Rig, prompts, rig

Policy = Literal["mask", "refill", "stop"]


def answers(batch: DataProto) -> list[list[int]]:
    return [row.tolist() for row in batch.ragged("responses")]


def uids(batch: DataProto, n: int = 3) -> list[str]:
    return list(batch.non_tensor_batch["uid"])[::n]


def test_a_partition_is_its_tickets_prompts_in_canonical_order() -> None:
    made = rig()
    first = made.fill(0)
    assert uids(first) == ["p0", "p1", "p2", "p3"]
    assert first.dense("group_ids").tolist() == [i for i in range(4) for _ in range(3)]
    assert first.dense("rewards").tolist() == [0.0, 1.0, 2.0] * 4
    made.trained(0)
    made.publish(1)
    assert uids(made.fill(1)) == ["p4", "p5", "p6", "p7"]
    made.trained(1)
    assert made.plane.status().accounts.trained == 24


def test_generation_waits_for_the_version_that_the_partition_needs() -> None:
    made = rig()
    made.fill(0)
    made.trained(0)
    asked = len(made.engine.asked)
    with pytest.raises(DeadlineError, match="partition 1: 4 of 4 groups unfilled"):
        made.rollout.fill(1)  # version 1 was never published
    assert len(made.engine.asked) == asked


@given(
    failing=st.sets(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 3))),
    at_once=st.integers(1, 5),
    order=st.integers(0, 1000),
    policy=st.sampled_from(["refill", "mask"]),
)
def test_what_is_trained_does_not_depend_on_who_finished_first(
    failing: set[tuple[int, int, int]], at_once: int, order: int, policy: Policy
) -> None:
    def run(engine: FakeEngine) -> tuple[list[tuple[list[str], list[list[int]], list[float]]], Rig]:
        made = rig(engine=engine, judge=lambda group, i: verdict(made, group, i), on_error=policy, max_draws=6)
        partitions = []
        for k in range(2):
            batch = made.fill(k)
            partitions.append((uids(batch), answers(batch), batch.dense("reward_valid").tolist()))
            made.trained(k)
            made.publish(k + 1)
        return partitions, made

    def verdict(made: Rig, group: DataProto, i: int) -> Verdict:
        # The ticket is in the label; sample 1 of the listed draws fails.
        words = made.scoring.labels[-1].replace(",", "").split()
        place, partition, attempt = int(words[1]), int(words[4]), int(words[6].rstrip(")"))
        return failed("broken") if i == 1 and (partition, place, attempt) in failing else Verdict(float(i))

    dice = random.Random(order)
    expected, plain = run(FakeEngine())
    got, made = run(FakeEngine(at_once=at_once, pick=lambda count: dice.randrange(count)))
    assert got == expected
    accounts = made.plane.status().accounts
    assert accounts == plain.plane.status().accounts
    assert accounts.trained == 24
    if policy == "mask":
        assert accounts.dropped == {}
        assert sum(not valid for *_, column in got for valid in column) == sum(a == 0 for *_, a in failing)
    else:
        assert all(valid for *_, column in got for valid in column)
        assert set(accounts.dropped) <= {FAILED}


def test_refills_draw_other_prompts_in_ticket_order_and_other_streams() -> None:
    def judge(group: DataProto, i: int) -> Verdict:
        return Verdict(float(i)) if group.non_tensor_batch["uid"][0] not in ("p1", "p3") else failed("broken")

    made = rig(judge=judge, on_error="refill", source=prompts(10))
    batch = made.fill(0)
    kept = uids(batch)
    assert (kept[0], kept[2]) == ("p0", "p2")
    source = prompts(10)
    for place in (1, 3):
        attempt = 1
        while (uid := source.refill(0, place, attempt).uid) in ("p1", "p3"):
            attempt += 1
        assert kept[place] == uid
    assert made.rollout.counts[FAILED] == len(made.scoring.labels) - 4
    seeds = [seed for request in made.engine.asked for seed in request.seeds]
    assert len(set(seeds)) == len(seeds)


def test_mask_keeps_the_group_and_marks_the_sample() -> None:
    made = rig(judge=lambda group, i: failed("no number") if i == 2 else Verdict(1.0))
    batch = made.fill(0)
    assert batch.dense("reward_valid").tolist() == [True, True, False] * 4
    assert made.rollout.report == {"scored": 8.0, "failed": 4.0, "timed_out": 0.0}
    assert made.rollout.counts == Counter()


def test_stop_raises_with_sample_and_reason() -> None:
    made = rig(judge=lambda group, i: failed("ZeroDivisionError: division by zero"), on_error="stop")
    with pytest.raises(RewardError, match=r"prompt p0\[0\].*division by zero"):
        made.fill(0)


def test_a_scorer_that_never_works_is_no_run_that_succeeds_on_nothing() -> None:
    made = rig(judge=lambda group, i: failed("KeyError: 'solution'"))
    with pytest.raises(
        RewardError, match=r"not one of the 12 samples of step 1 .*prompt p0\[0\]: KeyError: 'solution'"
    ):
        made.fill(0)


@pytest.mark.parametrize(("tickets", "n", "max_draws"), [(1, 2, 1), (4, 3, 5), (2, 8, 3)])
def test_b56_constant_rewards_under_a_filter_end_with_the_cause(tickets: int, n: int, max_draws: int) -> None:
    made = rig(tickets=tickets, n=n, max_draws=max_draws, filter_equal=True, judge=lambda group, i: Verdict(0.5))
    with pytest.raises(StarvationError, match=FILTERED):
        made.fill(0)
    assert len(made.engine.asked) <= tickets * max_draws
    made.plane.status().accounts.check()


@pytest.mark.parametrize("filter_equal", [False, True])
def test_a_scorer_that_fails_for_ever_ends_refilling_and_is_named(filter_equal: bool) -> None:
    policy: Policy = "mask" if filter_equal else "refill"
    made = rig(judge=lambda group, i: failed("the judge is away"), on_error=policy, filter_equal=filter_equal)
    with pytest.raises(StarvationError, match=f"{FAILED}.*the judge is away"):
        made.fill(0)


def test_groups_without_a_signal_are_drawn_anew() -> None:
    flat = {"p0", "p2"}
    made = rig(
        filter_equal=True,
        judge=lambda group, i: Verdict(1.0 if group.non_tensor_batch["uid"][0] in flat else float(i)),
    )
    batch = made.fill(0)
    assert not flat & set(uids(batch))
    assert made.rollout.counts == Counter({FILTERED: len(made.engine.asked) - 4})
    made.trained(0)
    assert made.plane.status().accounts.dropped == {FILTERED: 3 * (len(made.engine.asked) - 4)}


def test_equal_sums_of_different_parts_are_a_signal_where_parts_are_compared() -> None:
    made = rig(
        filter_equal=True,
        components=("right", "short"),
        judge=lambda group, i: Verdict(1.0, components=(i / 4, 1 - i / 4)) if i < 2 else failed("no number"),
    )
    batch = made.fill(0)
    assert not made.rollout.counts
    assert made.plane.status().accounts.dropped == {}
    assert batch.dense("reward_valid").tolist() == [True, True, False] * 4


@pytest.mark.parametrize(("overlong", "valid"), [("train", True), ("mask", False)])
def test_answers_cut_at_the_limit(overlong: Literal["train", "mask"], valid: bool) -> None:
    made = rig(engine=FakeEngine(finish_reason="length"), overlong=overlong)
    batch = made.fill(0)
    assert batch.dense("reward_valid").tolist() == [valid] * 12
    assert batch.dense("truncated").all()


def test_masked_overlong_samples_say_nothing_about_their_group() -> None:
    made = rig(engine=FakeEngine(finish_reason="length"), overlong="mask", filter_equal=True)
    with pytest.raises(StarvationError, match=FILTERED):
        made.fill(0)


def test_b82_every_sample_has_a_stream_of_its_own_and_a_rerun_has_the_same() -> None:
    def seeds(at_once: int, run_seed: int = 0) -> dict[str, tuple[int, ...]]:
        made = rig(n=8, engine=FakeEngine(at_once=at_once), seed=run_seed, source=prompts(3))
        for k in range(3):
            made.fill(k)
            made.trained(k)
            made.publish(k + 1)
        return {f"{request.key}": request.seeds for request in made.engine.asked}

    one = seeds(1)
    drawn = [seed for group in one.values() for seed in group]
    assert len(set(drawn)) == 3 * 4 * 8  # also where the same prompt is drawn again
    assert seeds(3) == one
    assert not set(drawn) & {seed for group in seeds(1, run_seed=1).values() for seed in group}


def test_scores_of_a_group_reach_its_own_samples() -> None:
    def judge(group: DataProto, i: int) -> Verdict:
        return Verdict(float(derive_seed(group.non_tensor_batch["uid"][0], i) % 100), metrics={"words": float(i)})

    made = rig(judge=judge, engine=FakeEngine(at_once=2, pick=lambda count: count - 1))
    batch = made.fill(0)
    expected = [derive_seed(f"p{place}", i) % 100 for place in range(4) for i in range(3)]
    assert batch.dense("rewards").tolist() == expected
    assert made.rollout.report["words"] == 1.0
    assert made.rollout.report[str(Outcome.SCORED)] == 12
    assert batch.ragged("responses").lengths.tolist() == [LENGTH] * 12


def test_a_greedy_answer_is_scored_in_its_ticket_and_not_trained() -> None:
    made = rig(baseline=True, judge=lambda group, i: Verdict(float(i), metrics={"seen": float(i)}))
    batch, plain = made.fill(0), rig().fill(0)
    assert {len(request.seeds) for request in made.engine.asked} == {4}
    assert answers(batch) == answers(plain)  # the drawn samples are those of a run without it
    assert batch.dense("rewards").tolist() == [0.0, 1.0, 2.0] * 4
    assert batch.dense("reward_baselines").tolist() == [3.0] * 12
    assert made.rollout.report["seen"] == 1.0  # of the samples that are trained
    made.trained(0)
    assert made.plane.status().accounts.trained == 12


@pytest.mark.parametrize("policy", ["mask", "refill"])
def test_a_group_whose_greedy_answer_has_no_score_has_nothing_to_compare_with(policy: Policy) -> None:
    def verdict(group: DataProto, i: int) -> Verdict:
        bad = i == 3 and group.non_tensor_batch["uid"][0] == "p1"
        return failed("broken") if bad else Verdict(float(i))

    made = rig(baseline=True, judge=verdict, on_error=policy, max_draws=9)
    batch = made.fill(0)
    if policy == "refill":
        assert made.rollout.counts[FAILED] == 1 and "p1" not in uids(batch)
        assert bool(batch.dense("reward_valid").all())
    else:
        assert batch.dense("reward_valid").tolist() == [True] * 3 + [False] * 3 + [True] * 6


@pytest.mark.parametrize(("greedy", "kept"), [(1.0, False), (0.5, True)])
def test_equal_rewards_are_a_signal_where_the_greedy_answer_scored_otherwise(greedy: float, kept: bool) -> None:
    made = rig(baseline=True, filter_equal=True, judge=lambda group, i: Verdict(greedy if i == 3 else 1.0))
    if kept:
        assert made.fill(0).dense("rewards").tolist() == [1.0] * 12
    else:
        with pytest.raises(StarvationError):
            made.fill(0)
