"""One line of config switches between any two estimators and losses, and the plan shows what that changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tandem.algorithms import ADVANTAGES, POLICY_LOSSES
from tandem.base.registry import Scope
from tandem.plan.plan import Plan
from tests.algorithms.entries import ESTIMATORS, GROUPED, LOSSES

Plans = Callable[..., Plan]
HYBRID = ("--hybrid", "execution.num_iters_per_train_update=4")
NEEDED_BESIDE = {
    "gae": ("critic.enable=true",),
    "gdpo": ("reward_manager={type: weighted_sum, parts: [{type: exact}, {type: keyword, keyword: x}]}",),
    "dro": ("algorithm.policy_loss.dro_beta=0.1",),
}
"""What a few need in other sections, or must be told."""


def words_of(estimator: str, loss: str) -> tuple[str, ...]:
    named = (f"algorithm.adv_estimator={estimator}", f"algorithm.policy_loss.type={loss}")
    return (*named, *NEEDED_BESIDE.get(estimator, ()), *NEEDED_BESIDE.get(loss, ()))


@pytest.mark.parametrize("mode", [(), HYBRID, ("--fully-async",)], ids=["colocate", "hybrid", "fully_async"])
def test_every_estimator_goes_with_every_loss_and_the_plan_shows_their_columns(
    plan_of: Plans, mode: tuple[str, ...]
) -> None:
    for estimator, loss in itertools.product(ESTIMATORS, LOSSES):
        plan = plan_of(*mode, *words_of(estimator, loss))
        assert plan.problems == () and plan.later == (), (estimator, loss)
        stages = {stage.name: stage for stage in plan.stages}
        asked = set(ADVANTAGES[estimator].signature.columns) - {"token_rewards"}
        assert asked <= set(stages["advantages"].needs)
        taken = set(POLICY_LOSSES[loss].signature.columns) - {"logprobs"}
        implied = {"old_logprobs"} if plan.old_logprobs == "implied" else set()
        assert taken - implied <= set(stages["train"].needs)
        assert ("values" in stages) == (estimator == "gae")
        assert ("reward_baselines" in stages["reward"].gives) == (estimator == "remax")
        assert ("sum_pi_squared" in stages.get("old", stages["train"]).gives) == ("sum_pi_squared" in asked)


def test_what_cannot_be_pipelined_says_which_of_them_it_is(plan_of: Plans) -> None:
    pipelined = (*HYBRID, "execution.train_pipelining=accumulate")
    for estimator, loss in itertools.product(ESTIMATORS, LOSSES):
        reasons = [
            p.reason
            for p in plan_of(*pipelined, *words_of(estimator, loss)).problems
            if "partition at once" in p.reason
        ]
        wide = [entry.name for entry in (ADVANTAGES[estimator], POLICY_LOSSES[loss]) if entry.scope is Scope.PARTITION]
        assert len(reasons) == bool(wide), (estimator, loss)
        assert all(name in reasons[0] for name in wide)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_b03_every_estimator_with_a_group_baseline_is_refused_with_one_sample(plan_of: Plans, estimator: str) -> None:
    plan = plan_of(*words_of(estimator, "ppo_clip"), "actor_rollout_ref.rollout.n=1")
    reasons = [problem.reason for problem in plan.problems if problem.key == "actor_rollout_ref.rollout.n"]
    assert any("every advantage is 0" in reason for reason in reasons) == (estimator in GROUPED)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_is_weighed_or_says_that_it_takes_no_weights(plan_of: Plans, loss: str) -> None:
    plan = plan_of(*words_of("grpo", loss), "algorithm.rollout_correction.weights=sequence")
    takes = "tis_weights" in POLICY_LOSSES[loss].signature.optional_columns
    (train,) = (stage for stage in plan.stages if stage.name == "train")
    assert takes == (plan.problems == ()) == ("tis_weights" in train.needs)
    assert takes or "no tis_weights" in plan.problems[0].reason


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("execution.max_staleness=2",), True),
        (("execution.max_staleness=1",), False),
        (("execution.max_staleness=2", "algorithm.policy_loss.type=decoupled_ppo"), False),
        (("execution.max_staleness=2", "algorithm.rollout_correction.weights=token"), False),
    ],
)
def test_old_samples_that_nothing_accounts_for_are_noted(plan_of: Plans, words: tuple[str, ...], told: bool) -> None:
    assert any("2 versions old" in note for note in plan_of("--hybrid", *words).notes) is told


@pytest.mark.parametrize(("kind", "told"), [("k1", True), ("kl", True), ("k1+", False), ("k3", False), ("abs", False)])
def test_a_kl_that_holds_nothing_in_the_loss_is_noted(plan_of: Plans, kind: str, told: bool) -> None:
    in_loss = plan_of(f"algorithm.kl={{in: loss, type: {kind}}}")
    assert in_loss.problems == ()
    assert any("mean 0" in note for note in in_loss.notes) is told
    assert not any("mean 0" in note for note in plan_of(f"algorithm.kl={{in: reward, type: {kind}}}").notes)


@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=20"])
def test_b29_samples_of_a_narrower_distribution_without_a_correction_are_noted(plan_of: Plans, cut: str) -> None:
    word = f"actor_rollout_ref.rollout.{cut}"
    assert any("as if they came from the whole distribution" in note for note in plan_of(word).notes)
    corrected = plan_of(word, "algorithm.use_tis=true", "actor_rollout_ref.rollout.logprobs_of=full")
    assert corrected.problems == ()
    assert not any("whole distribution" in note for note in (*corrected.notes, *plan_of().notes))
