"""The actor role: how a partition becomes optimizer steps, and whose weights compute what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ContractError
from tandem.roles.actor import Actor
from tandem.roles.batching import Batching
from tandem.roles.loss import Loss, with_rewards, without_samples
from tandem.roles.train_group import TrainGroup
from tandem.stages.stage import BatchStage
from tests.roles.fake_training import FakeTrainEngine, SamplesObjective, scored

OBJECTIVE = SamplesObjective()


def actor(
    engine: FakeTrainEngine, groups: int = 100, epochs: int = 1, *, reference: bool = False, seed: int = 0
) -> Actor:
    ranks = TrainGroup.in_process(engine, deadline_s=10)  # type: ignore[arg-type]
    return Actor(ranks, Batching(groups, epochs, seed), keep_reference=reference)


@given(
    mini_batches=st.integers(1, 4),
    groups=st.integers(1, 3),
    n=st.integers(1, 3),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_every_pass_trains_each_group_once_and_whole(
    mini_batches: int, groups: int, n: int, epochs: int, seed: int
) -> None:
    engine, again = FakeTrainEngine(), FakeTrainEngine()
    batch = scored(mini_batches * groups, n)
    metrics = actor(engine, groups, epochs, seed=seed).step(Loss(batch, OBJECTIVE))
    assert metrics["optim/applied"] == len(engine.trained) == mini_batches * epochs
    for epoch in range(epochs):
        chunk = engine.trained[epoch * mini_batches : (epoch + 1) * mini_batches]
        assert sorted(pair for mini in chunk for pair in mini) == [
            (g, i) for g in range(len(batch) // n) for i in range(n)
        ]
        for mini in chunk:
            assert len({group for group, _ in mini}) == groups
            assert mini == sorted(mini)  # canonical inside a mini-batch
    assert engine.denominators == [groups * n] * len(engine.trained)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    actor(again, groups, epochs, seed=seed).step(Loss(batch.reorder(order), OBJECTIVE))
    assert [sorted(mini) for mini in again.trained] == [sorted(mini) for mini in engine.trained]


def test_mini_batches_differ_between_passes_and_steps_and_not_between_runs() -> None:
    def run() -> list[list[tuple[int, int]]]:
        engine = FakeTrainEngine()
        made = actor(engine, 2, 2)
        for _ in range(2):
            made.step(Loss(scored(8), OBJECTIVE))
        return engine.trained

    trained = run()
    assert trained == run()
    passes = [trained[i : i + 4] for i in range(0, 16, 4)]
    assert len({str(one) for one in passes}) == 4


def test_b22_a_skipped_step_advances_the_version_and_not_the_updates() -> None:
    engine = FakeTrainEngine(skip=[2])
    made = actor(engine)
    seen = []
    for _ in range(3):
        metrics = made.step(Loss(scored(2), OBJECTIVE))
        seen.append((made.steps, made.updates, float(engine.weight), metrics["optim/skipped_steps"]))
    assert seen == [(1, 1, 1.0, 0.0), (2, 1, 1.0, 1.0), (3, 2, 2.0, 1.0)]


def test_a_mini_batch_without_a_trained_token_makes_no_optimizer_step() -> None:
    engine = FakeTrainEngine()
    batch = scored(4)
    excluded = batch.dense("group_ids") < 2
    metrics = actor(engine, 1).step(Loss(without_samples(batch, excluded), OBJECTIVE))
    assert sorted(pair for mini in engine.trained for pair in mini) == [(2, 0), (2, 1), (3, 0), (3, 1)]
    assert (metrics["optim/empty_mini_batches"], metrics["optim/applied"]) == (2.0, 2.0)
    made = actor(FakeTrainEngine())
    metrics = made.step(Loss(without_samples(batch, torch.ones(8, dtype=torch.bool)), OBJECTIVE))
    assert metrics == {"optim/empty_mini_batches": 1.0}
    assert (made.steps, made.updates) == (1, 0)


def test_a_mini_batch_of_which_all_was_rejected_makes_no_optimizer_step() -> None:
    engine, batch = FakeTrainEngine(), scored(2)
    responses = batch.ragged("responses")
    batch.batch["loss_mask"] = responses.like(torch.zeros(len(responses.values), dtype=torch.bool))
    metrics = actor(engine).step(Loss(batch, OBJECTIVE))
    assert metrics["optim/empty_mini_batches"] == 1 and not engine.trained


def test_reference_log_probs_are_of_the_weights_at_the_start() -> None:
    engine = FakeTrainEngine()
    made = actor(engine, reference=True)
    for _ in range(3):
        made.step(Loss(scored(2), OBJECTIVE))
    batch = made.old_logprobs(made.ref_logprobs(scored(2)))
    assert set(batch.ragged("ref_logprobs").values.tolist()) == {0.0}
    assert set(batch.ragged("old_logprobs").values.tolist()) == {-3.0}
    assert float(engine.weight) == 3.0  # the actor is back
    made.refresh_reference()
    assert set(made.ref_logprobs(scored(2)).ragged("ref_logprobs").values.tolist()) == {-3.0}


def test_a_reward_that_is_no_number_takes_its_sample_out() -> None:
    batch = with_rewards(scored(2), torch.tensor([1.0, float("nan"), float("inf"), 0.0]))
    assert batch.dense("reward_valid").tolist() == [True, False, False, True]
    rows = [row.tolist() for row in batch.ragged("response_mask")]
    assert rows == [[True] * 3, [False] * 3, [False] * 3, [True] * 3]
    assert scored(2).ragged("response_mask").values.all()


def test_a_stage_is_held_to_its_columns() -> None:
    def gives_two(batch):  # type: ignore[no-untyped-def]
        return actor(FakeTrainEngine()).old_logprobs(batch)

    stage = BatchStage("old", ("prompts", "responses"), ("old_logprobs",), gives_two)
    assert "old_logprobs" in stage(scored(1)).columns
    with pytest.raises(ContractError, match="stage 'old' needs column 'ref_logprobs'"):
        BatchStage("old", ("ref_logprobs",), ("old_logprobs",), gives_two)(scored(1))
    with pytest.raises(ContractError, match=r"planned to give \('values',\).*old_logprobs"):
        BatchStage("old", ("prompts",), ("values",), gives_two)(scored(1))
