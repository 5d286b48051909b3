"""What a step does is what the plan says: its stages, in order, and the columns that they add."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.seven import train

CONFIGS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "KL in the loss": ("algorithm.kl.in=loss",),
    "KL in the reward": ("algorithm.kl.in=reward",),
    "a coefficient of 0 is off": ("algorithm.kl.in=loss", "algorithm.kl.coef=0"),
    "TIS": ("algorithm.use_tis=true",),
    "weights of answers, rejections, a veto": (
        "algorithm.rollout_correction={weights: sequence, normalize: true, reject: [{by: token_k3, high: 0.5}]}",
        "algorithm.rollout_correction.veto=1e-4",
    ),
    "mini-batches": ("actor_rollout_ref.actor.ppo_mini_batch_size=2",),
    "old from the engine": ("algorithm.old_logprobs=rollout",),
    "another estimator": ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.old_logprobs=recompute"),
    "sums of squared probabilities": ("algorithm.adv_estimator=optimal_token_baseline",),
    "a greedy answer": ("algorithm.adv_estimator=remax",),
    "parts of a reward": (
        "algorithm.adv_estimator=gdpo",
        "reward_manager.type=weighted_sum",
        "reward_manager.parts=[{type: match_fraction}, {type: keyword, keyword: '7', weight: -1}]",
    ),
    "all of it": (
        "algorithm.kl.in=reward",
        "algorithm.use_tis=true",
        "algorithm.entropy_coef=0.01",
        "actor_rollout_ref.ref.update_interval=1",
        "actor_rollout_ref.actor.ppo_epochs=2",
    ),
}

EXPECTED = {
    "plain": ["advantages"],
    "KL in the loss": ["ref", "advantages"],
    "KL in the reward": ["ref", "old", "advantages"],
    "a coefficient of 0 is off": ["advantages"],
    "TIS": ["old", "correction", "advantages"],
    "weights of answers, rejections, a veto": ["old", "correction", "advantages"],
    "mini-batches": ["old", "advantages"],
    "old from the engine": ["old", "advantages"],
    "another estimator": ["old", "advantages"],
    "sums of squared probabilities": ["old", "advantages"],
    "a greedy answer": ["advantages"],
    "parts of a reward": ["advantages"],
    "all of it": ["ref", "old", "correction", "advantages"],
}


@pytest.mark.parametrize("name", CONFIGS)
def test_executed_stages_and_columns_are_the_planned_ones(task: Path, tmp_path: Path, name: str) -> None:
    run = train(
        task,
        f"trainer.output_dir={tmp_path}",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_steps=2",
        *CONFIGS[name],
    )
    session = run.session
    plan, progress = session.plan, session.run.progress
    assert progress.executed == [stage.name for stage in plan.stages]
    assert progress.executed == ["rollout", "reward", *EXPECTED[name], "train", "publish"]
    assert progress.trained is not None
    batch = progress.trained[0]
    planned = {*plan.source_columns, *(column for stage in plan.stages for column in stage.gives)}
    assert {*batch.columns, *batch.non_tensor_batch} == planned
    (trained,) = (stage for stage in plan.stages if stage.name == "train")
    objective = session.composite.objective
    assert set(objective.columns) <= set(trained.needs) <= planned
    read = {*objective.columns, *objective.optional_columns} & planned
    assert read - {"rollout_logprobs"} == set(trained.needs) - {"prompts", "responses", "response_mask"}
    timed = {key.removeprefix("time/") for key in run.rows[-1] if key.startswith("time/")}
    assert timed == {*progress.executed, "step", "turns", "samples"}  # the last: what the step before took to keep them


@pytest.mark.parametrize("name", ["KL in the reward", "all of it", "old from the engine"])
@pytest.mark.parametrize("mode", ["hybrid", "fully_async"])
def test_streaming_modes_execute_the_planned_stages(task: Path, tmp_path: Path, name: str, mode: str) -> None:
    """Those of the actor's loop in the planned order, sub-batch by sub-batch; all columns are there in the end."""
    words = (*CONFIGS[name], f"execution={{mode: {mode}, num_iters_per_train_update: 2}}", "data.train_batch_size=4")
    run = train(task, f"trainer.output_dir={tmp_path}", "trainer.total_steps=2", *words)
    plan, progress = run.session.plan, run.session.run.progress
    own = [stage.name for stage in plan.stages if stage.role == "actor"]
    assert list(dict.fromkeys(progress.executed)) == own
    assert progress.trained is not None
    planned = {*plan.source_columns, *(column for stage in plan.stages for column in stage.gives)}
    assert {*progress.trained[0].columns, *progress.trained[0].non_tensor_batch} == planned
    forwarded = mode == "fully_async" and plan.old_logprobs == "recompute"
    assert ("old_version" in planned) == forwarded  # which version actor_fwd scored with
