"""Invariant 4: at staleness 0 every mode is the synchronous run, bit by bit; pipelining changes rounding at most."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.seven import Run, distance, equal, train

FOUR = (
    "trainer.total_steps=4",
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "trainer.rollouts_per_step=16",
    "trainer.exact=true",
)
SYNCHRONOUS = {
    "hybrid in one piece": "{mode: hybrid, max_staleness: 0}",
    "hybrid in 4 sub-batches": "{mode: hybrid, max_staleness: 0, num_iters_per_train_update: 4}",
    "hybrid with pushes behind the next step": "{mode: hybrid, max_staleness: 0, weight_sync: {overlap: true}}",
    "fully async in one piece": "{mode: fully_async, max_staleness: 0}",
    "fully async in 4 sub-batches": "{mode: fully_async, max_staleness: 0, num_iters_per_train_update: 4}",
}
ALGORITHMS = {
    "the greedy answer as a baseline": ("algorithm.adv_estimator=remax", "algorithm.old_logprobs=recompute"),
    "KL in the reward, adaptive, refreshed reference": (
        "algorithm.kl={in: reward, coef: 0.05, controller: adaptive, target: 0.01, horizon: 500}",
        "actor_rollout_ref.ref.update_interval=2",
    ),
    "KL in the loss, a baseline per token, corrected rollouts, mini-batches": (
        "algorithm.kl={in: loss, coef: 0.05}",
        "algorithm.adv_estimator=optimal_token_baseline",
        "algorithm.rollout_correction={weights: sequence, normalize: true, reject: [{by: token_k1, quantile: 0.7}]}",
        "algorithm.rollout_correction.veto=1e-4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ),
}


@pytest.fixture(scope="module", params=ALGORITHMS)
def algorithm(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The words of one algorithm."""
    return ALGORITHMS[request.param]


@pytest.fixture(scope="module")
def colocated(task: Path, algorithm: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The synchronous run."""
    return train(task, f"trainer.output_dir={tmp_path_factory.mktemp('colocate')}", *FOUR, *algorithm)


def told(run: Run) -> list[tuple[object, ...]]:
    """What was generated and trained, as far as it is recorded."""
    keys = (
        "reward/mean",
        "length/mean",
        "loss/policy",
        "grad/norm",
        "kl/reward",
        "kl/mean",
        "lag/max",
        "mismatch/rejected",
        "reward/greedy",
    )
    return [tuple(row.get(key) for key in keys) for row in run.rows]


@pytest.mark.parametrize("mode", SYNCHRONOUS)
def test_samples_and_weights_are_bit_equal(
    task: Path, algorithm: tuple[str, ...], colocated: Run, tmp_path: Path, mode: str
) -> None:
    run = train(task, f"trainer.output_dir={tmp_path}", f"execution={SYNCHRONOUS[mode]}", *FOUR, *algorithm)
    assert run.prompts == colocated.prompts
    assert told(run) == told(colocated)
    assert equal(run.weights, colocated.weights)


@pytest.mark.parametrize("pipelining", ["accumulate", "off"])
def test_accumulation_is_the_same_update_up_to_rounding(task: Path, tmp_path: Path, pipelining: str) -> None:
    words = (task, "trainer.total_steps=2", "algorithm.kl={in: loss, coef: 0.05}")
    execution = f"{{mode: hybrid, max_staleness: 0, num_iters_per_train_update: 4, train_pipelining: {pipelining}}}"
    merged = train(*words, f"trainer.output_dir={tmp_path / 'colocate'}")
    run = train(*words, f"execution={execution}", f"trainer.output_dir={tmp_path / 'hybrid'}")
    assert distance(run.weights, merged.weights) < 1e-5
    assert run.rows[-1]["updates"] == 2


def test_stepping_makes_each_slice_a_mini_batch_and_one_version(task: Path, tmp_path: Path) -> None:
    execution = "{mode: hybrid, max_staleness: 0, num_iters_per_train_update: 4, train_pipelining: step}"
    run = train(task, f"trainer.output_dir={tmp_path}", f"execution={execution}", "trainer.total_steps=3")
    assert [row["updates"] for row in run.rows] == [4, 8, 12]
    assert [row["version"] for row in run.rows] == [1, 2, 3]
    assert run.session.plan.old_logprobs == "recompute"
