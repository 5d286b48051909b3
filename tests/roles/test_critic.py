"""The critic role: the actor's mini-batches, a partition at a time, the same on any number of ranks."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from tandem.base.errors import DataError, DeadlineError
from tandem.columns.proto import DataProto
from tandem.config.model import OptimConfig
from tandem.roles.batching import Batching
from tandem.roles.critic import CRITIC, Critic
from tandem.roles.train_group import TrainGroup
from tandem.train import checkpoint
from tandem.train.value_objective import ValueObjective
from tests.roles.rank_processes import group_of
from tests.train.values import value_engine, valued_batch

LENGTHS = [7, 2, 30, 4, 9, 1, 12, 5]
BATCHING = Batching(2, 2, seed=3)


def critic_on(group: TrainGroup, batching: Batching = BATCHING) -> Critic:
    engine = value_engine()
    return Critic(engine.model, group, batching, ValueObjective())


def critic_here(batching: Batching = BATCHING, **options: object) -> Critic:
    engine = value_engine(**options)  # type: ignore[arg-type]
    return Critic(engine.model, TrainGroup.in_process(engine, deadline_s=60), batching, ValueObjective())


def weights(critic: Critic) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in critic.export()}


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=2e-5, rtol=1e-4)


def test_two_ranks_value_and_train_as_one(tmp_path: Path) -> None:
    batch, found = valued_batch(LENGTHS, masked=True), []
    plain = batch.select(*(name for name in batch.batch if name != "values"))
    for world in (0, 2):
        with group_of(world, partial(value_engine, max_tokens=40), tmp_path / str(world)) as group:
            critic = critic_on(group)
            for _ in range(2):
                metrics = critic.step(batch)
            found.append((critic.values(plain).ragged("values").values, metrics, weights(critic)))
            assert metrics["value/applied"] == 4 and critic.updates == 8
    (values, metrics, trained), (others, more, same) = found
    torch.testing.assert_close(others, values, atol=2e-5, rtol=1e-4)
    assert more == pytest.approx(metrics, rel=1e-3, abs=1e-5)
    close(same, trained)


def test_its_mini_batches_are_those_of_the_actor() -> None:
    batch = valued_batch([3] * 16)
    rows = [chosen.tolist() for chosen in BATCHING.mini_batches(batch, 5)]
    assert rows == [chosen.tolist() for chosen in Batching(2, 2, seed=3).mini_batches(batch, 5)]
    assert rows != [chosen.tolist() for chosen in BATCHING.mini_batches(batch, 6)]
    assert [len(chosen) for chosen in rows] == [4] * 8
    assert sorted(row for chosen in rows for row in chosen) == sorted([*range(16), *range(16)])
    assert list(Batching(2, 2, seed=3, untrained_steps=6).mini_batches(batch, 5)) == []
    assert len(list(Batching(2, 2, seed=3, untrained_steps=6).mini_batches(batch, 6))) == 8


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_b21_b22_a_gradient_that_is_not_finite_is_skipped_and_counted(poison: float) -> None:
    batch = valued_batch([3, 4, 2, 5])
    returns = batch.ragged("returns").values.clone()
    returns[0] = poison
    bad = batch.select(*batch.batch)
    bad.batch["returns"] = batch.ragged("returns").like(returns)
    critic = critic_here(Batching(1, 1, seed=0))
    metrics = critic.step(bad)
    assert (metrics["value/applied"], metrics["value/skipped_steps"]) == (1, 1)
    whole = critic_here(Batching(2, 1, seed=0))
    before = weights(whole)
    whole.step(bad)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(whole).items())
    assert (whole.steps, whole.updates) == (1, 0)
    assert whole.step(batch)["value/applied"] == 1


def test_what_a_correction_rejects_leaves_the_value_loss_and_its_count() -> None:
    batch, rejected, shorter = (valued_batch(LENGTHS) for _ in range(3))
    kept = torch.arange(len(batch.ragged("responses").values)) % 4 != 2
    rejected.batch["loss_mask"] = shorter.batch["response_mask"] = batch.ragged("responses").like(kept)
    whole, left, expected = (critic_here().step(one) for one in (batch, rejected, shorter))
    assert left == pytest.approx(expected, rel=1e-6) and left["value/loss"] != pytest.approx(whole["value/loss"])


def test_a_partition_in_which_nothing_is_to_be_learned_counts_as_a_step() -> None:
    batch = valued_batch([3, 4])
    batch.batch["response_mask"] = batch.ragged("responses").like(torch.zeros(7, dtype=torch.bool))
    critic = critic_here()
    assert critic.step(batch) == {}
    assert (critic.steps, critic.updates) == (1, 0)


def returning(values: list[int], returns: list[int]) -> DataProto:
    batch = valued_batch([len(values)], group_size=1)
    for name, numbers in (("values", values), ("returns", returns)):
        batch.batch[name] = batch.ragged("responses").like(torch.tensor(numbers).float())
    return batch


def test_explained_variance_by_hand() -> None:
    def explained(values: list[int], returns: list[int]) -> float | None:
        return critic_here().step(returning(values, returns)).get("value/explained_variance")

    assert explained([1, 2, 3, 4], [1, 2, 3, 4]) == pytest.approx(1)
    assert explained([5, 5, 5, 5], [1, 2, 3, 4]) == pytest.approx(0)
    assert explained([4, 3, 2, 1], [1, 2, 3, 4]) == pytest.approx(-3)
    assert explained([1, 2, 3, 4], [2, 2, 2, 2]) is None
    assert critic_here().step(returning([0, 1], [2, 4]))["value/returns"] == 3


def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_moves_with_the_runs(tmp_path: Path) -> None:
    batch = valued_batch(LENGTHS)
    part = tmp_path / ".critic.partial"
    (part / "step_00000009").mkdir(parents=True)  # what a killed process left
    with group_of(2, value_engine, tmp_path / "ranks") as group:
        critic = critic_on(group)
        critic.step(batch)
        critic.save(part, 4)
        run = checkpoint.save(tmp_path / "run", 4, tensors={}, facts={}, keep=1, parts={CRITIC: part})
        critic.step(batch)
        straight = weights(critic)
    assert not part.exists()
    resumed = critic_here(seed=9)
    resumed.load(run)
    assert (resumed.steps, resumed.updates) == (1, 4)
    resumed.step(batch)
    close(weights(resumed), straight)


def test_a_checkpoint_without_a_critic_is_named(tmp_path: Path) -> None:
    run = checkpoint.save(tmp_path, 4, tensors={}, facts={}, keep=1)
    with pytest.raises(DataError, match="holds no critic"):
        critic_here().load(run)


def test_whoever_waits_for_it_hears_who_blocks() -> None:
    critic = critic_here()
    critic.await_steps(0, 0.0)
    with pytest.raises(DeadlineError, match=r"partition 0; blocked by the actor's loop"):
        critic.await_steps(1, 0.01)
    critic.step(valued_batch([2, 2]))
    critic.await_steps(1, 0.0)


@pytest.mark.parametrize(("cliprange", "least", "most"), [(math.inf, 5.0, 11.0), (0.5, 0.5, 2.0)])
def test_the_clip_bounds_how_far_a_partition_pulls(cliprange: float, least: float, most: float) -> None:
    """A value that is past its range on the way to its return has no gradient any more."""
    engine = value_engine(optim=OptimConfig(lr=5e-4))
    group = TrainGroup.in_process(engine, deadline_s=60)
    critic = Critic(engine.model, group, Batching(1, 100, seed=0), ValueObjective(cliprange))
    plain = valued_batch([3], group_size=1)
    plain = plain.select(*(name for name in plain.batch if name not in ("values", "returns")))
    batch = critic.values(plain)
    before = batch.ragged("values")
    batch.batch["returns"] = before.like(before.values + 10)
    critic.step(batch)
    moved = critic.values(plain).ragged("values").values - before.values
    assert least < float(moved.min()) and float(moved.max()) < most
