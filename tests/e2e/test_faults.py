"""What goes wrong on the way is skipped and counted, or ends the run with its cause; nothing succeeds on nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.base.errors import ContractError, RewardError, StarvationError, TandemError
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.control.colocate import train_colocate
from tandem.control.entry import run_train
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.observe.trackers import TRACKERS, RunInfo
from tandem.plan.plan import compile_plan
from tandem.roles.loss import Loss
from tandem.rollout.protocol import GroupOutput, GroupRequest, Sampling
from tests.e2e.seven import equal, prepare, started, train, training_engine, write_rows

FIVE = ("trainer.total_steps=5",)
SMALL = ("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "trainer.total_steps=5")


def scorer(folder: Path, body: str) -> tuple[str, str]:
    """The words that make ``body`` the scorer."""
    file = folder / "scorer_of_mine.py"
    file.write_text(f"def mine(response, ground_truth):\n    {body}\n")
    return ("reward_manager.type=mine", f"reward_manager.file={file}")


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_b22_a_gradient_that_is_not_finite_is_skipped_and_counted(task: Path, tmp_path: Path, poison: float) -> None:
    weights: list[dict[str, torch.Tensor]] = []
    with started(
        task, f"trainer.output_dir={tmp_path}", *FIVE, "actor_rollout_ref.actor.optim.schedule=linear"
    ) as session:
        engine: Any = training_engine(session)
        accumulate, publish = engine.forward_backward, session.composite.engine.load

        def poisoned(*arguments: Any) -> Any:
            total = accumulate(*arguments)
            if session.run.progress.step == 2:
                next(session.composite.model.parameters()).grad[0, 0] = poison  # type: ignore[index]
            return total

        def published(*arguments: Any) -> Any:
            weights.append({name: tensor.clone() for name, tensor in engine.shards().items()})
            return publish(*arguments)

        engine.forward_backward = poisoned
        session.composite.engine.load = published  # type: ignore[method-assign, assignment]
        train_colocate(session)
        rows = read_rows(tmp_path / METRICS_FILE)
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["updates"] for row in rows] == [1, 2, 2, 3, 4]
    assert [row["optim/skipped_steps"] for row in rows] == [0, 0, 1, 1, 1]
    assert equal(weights[2], weights[3])
    assert all(not equal(weights[k], weights[k + 1]) for k in (0, 1, 3, 4))
    rates = [float(str(row["optim/lr"])) for row in rows]
    assert rates[3] == rates[2] > rates[4]  # the schedule waited
    assert rows[2]["grad/norm"] is None


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_b27_engine_and_trainer_mean_the_same_distribution(task: Path, tmp_path: Path, temperature: float) -> None:
    """On a policy that is far from uniform: after a step with a huge rate."""
    words = (f"actor_rollout_ref.rollout.temperature={temperature}", "actor_rollout_ref.actor.optim.lr=0.03")
    with started(task, f"trainer.output_dir={tmp_path}", *SMALL, *words) as session:
        for _ in range(3):
            colocate_step(session)
        batch = colocate_step(session)
    old, rollout = batch.ragged("old_logprobs"), batch.ragged("rollout_logprobs")
    assert float((old.values - rollout.values).abs().max()) < 1e-4
    assert float(rollout.values.std()) > 0.1


def colocate_step(session: Any) -> Any:
    """One step by hand; the batch with the log-probs that trainer and engine give it."""
    k = session.run.progress.step
    session.weights.push(k)
    with session.rollout.generating():
        session.rollout.fill(k)
    batch = session.composite.actor.old_logprobs(session.samples.complete(k))
    for stage in session.stages.stages:
        batch = stage(batch)
    update = session.actor.step(Loss(batch, session.objective))
    session.run.end_step(k, batch, update)
    return batch


@pytest.mark.parametrize("cut", ["actor_rollout_ref.rollout.top_p=0.6", "actor_rollout_ref.rollout.top_k=3"])
def test_b29_log_probs_under_a_truncated_distribution(task: Path, tmp_path: Path, cut: str) -> None:
    words = [str(task), f"trainer.output_dir={tmp_path}", *SMALL, cut, "algorithm.use_tis=true"]
    (problem,) = compile_plan(load_words(words, Config)).problems
    assert "truncated distribution" in problem.reason
    with started(*words, "actor_rollout_ref.rollout.logprobs_of=full") as session:
        batch = colocate_step(session)
    old, full = batch.ragged("old_logprobs").values, batch.ragged("rollout_logprobs").values
    assert float((old - full).abs().max()) < 1e-4
    assert float((batch.ragged("tis_weights").values - 1).abs().max()) < 1e-3
    with started(*words[:-1]) as session:  # of the truncated one: not the trainer's, and nothing reads them
        batch = colocate_step(session)
    old, sampled = batch.ragged("old_logprobs").values, batch.ragged("rollout_logprobs").values
    assert float((sampled - old).mean()) > 0.2


def test_b39_sleep_and_wake_keep_the_newest_weights(task: Path, tmp_path: Path) -> None:
    run = train(task, f"trainer.output_dir={tmp_path}", *SMALL, "actor_rollout_ref.actor.optim.lr=0.03")
    assert max(run.column("mismatch/abs")) < 1e-4
    assert run.column("updates")[-1] >= 3
    with pytest.raises(TandemError, match="asleep"):
        run.session.composite.engine.generate([], Sampling(n=1, max_tokens=1))


def test_samples_that_are_too_stale_are_never_trained(task: Path, tmp_path: Path) -> None:
    with started(task, f"trainer.output_dir={tmp_path}", *FIVE) as session:
        load = session.composite.engine.load

        def stuck(weights: Any, version: int) -> Any:
            return load(weights, min(version, 1))

        session.composite.engine.load = stuck  # type: ignore[method-assign]
        with pytest.raises(ContractError, match="step 2 was given samples of lags 1 to 1; max_staleness is 0"):
            train_colocate(session)
        assert session.composite.actor.updates == 2


@pytest.mark.parametrize("when", ["init", "log", "finish"])
def test_b89_a_tracker_that_fails_costs_nothing_but_itself(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    class Broken:
        def __init__(self, run: RunInfo) -> None:
            if when == "init":
                raise ConnectionError("no server")

        def log(self, step: int, metrics: Mapping[str, object]) -> None:
            if when == "log":
                raise RuntimeError("no quota")

        def finish(self) -> None:
            if when == "finish":
                raise SystemExit(3)

    monkeypatch.setattr(TRACKERS, "_entries", dict(TRACKERS._entries))
    TRACKERS.register("broken_tracker")(Broken)
    run = train(task, f"trainer.output_dir={tmp_path}", *SMALL, "trainer.logger=[broken_tracker, console]")
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5]
    assert (tmp_path / "final" / "config.json").is_file() and (tmp_path / "report.html").is_file()


@pytest.mark.parametrize(("policy", "kept"), [("error", 0), ("left", 3), ("right", 3), ("drop", 2)])
def test_b92_one_length_policy_and_the_same_ids_for_engine_and_trainer(
    task: Path, tmp_path: Path, policy: str, kept: int
) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl",
        [{"prompt": text, "answer": "7777"} for text in ("7>", "1234567>", "77>")],
    )
    words = (
        task, f"trainer.output_dir={tmp_path / 'run'}", f"data.train_files=[{rows}]", "data.train_batch_size=6",
        "data.max_prompt_length=4", f"data.on_overlong_prompt={policy}", "trainer.total_steps=1",
    )  # fmt: skip
    if policy == "error":
        with pytest.raises(TandemError, match=r"row 2: the prompt has 8 tokens, more than max_prompt_length = 4"):
            prepare(*words)
        return
    asked: set[tuple[int, ...]] = set()
    with started(*words) as session:
        generate = session.composite.engine.generate

        def spied(requests: Iterator[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
            def seen() -> Iterator[GroupRequest]:
                for request in requests:
                    asked.add(tuple(request.prompt_ids.tolist()))
                    yield request

            return generate(seen(), sampling)

        session.composite.engine.generate = spied  # type: ignore[method-assign, assignment]
        train_colocate(session)
        assert session.run.progress.trained is not None
        batch = session.run.progress.trained[0]
        text = {session.composite.tokenizer.decode(list(ids)) for ids in asked}
    assert {tuple(row.tolist()) for row in batch.ragged("prompts")} == asked
    assert set(batch.non_tensor_batch["prompt_text"]) == text
    assert text == {"7>", "77>"} | {"left": {"567>"}, "right": {"1234"}, "drop": set()}[policy]
    assert len(text) == kept


FAILING: dict[str, tuple[str, tuple[str, ...], type[TandemError], str]] = {
    "every scoring fails": ("raise KeyError('solution')", (), RewardError, "not one of the 16 .*KeyError: 'solution'"),
    "stop at the first": (
        "return 1 / (response.count('1') - 1)",
        ("reward_manager.on_error=stop",),
        RewardError,
        r"no reward for .*division by zero.*on_error: mask",
    ),
    "refilled for ever": (
        "return float('nan')",
        ("reward_manager.on_error=refill",),
        StarvationError,
        "reward failed.*returned nan, not a finite number",
    ),
    "filtered for ever": (
        "return 0.5",
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_draws=3"),
        StarvationError,
        "equal rewards",
    ),
    "a reward that teaches nothing": ("return 0.5", (), TandemError, "not one optimizer step was applied in 5 steps"),
}


@pytest.mark.parametrize("name", FAILING)
def test_b56_no_run_succeeds_on_nothing(task: Path, tmp_path: Path, name: str) -> None:
    body, words, error, message = FAILING[name]
    output = tmp_path / "run"
    config = load_words([str(task), f"trainer.output_dir={output}", *SMALL, *scorer(tmp_path, body), *words], Config)
    with pytest.raises(error, match=message):
        run_train(config, compile_plan(config))
    assert (output / "report.html").is_file()


def test_failures_of_some_samples_are_left_out_and_counted(task: Path, tmp_path: Path) -> None:
    words = scorer(tmp_path, "return 1 / response.count('1')")
    run = train(task, f"trainer.output_dir={tmp_path / 'run'}", *SMALL, *words)
    failed = run.column("reward/failed")
    assert sum(failed) > 0 and failed == run.column("reward/excluded")
    assert all(a + b == 16 for a, b in zip(failed, run.column("reward/scored"), strict=True))
    assert all(0 < mean <= 1 for mean in run.rewards)
