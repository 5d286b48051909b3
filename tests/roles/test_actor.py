"""One training step, whole or slice by slice: the same update, the right old policy, counters that add up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.models.fingerprint import fingerprint
from tandem.models.loading import as_causal_lm, new_model
from tandem.models.lora import get_lora_model
from tandem.roles.actor import Actor
from tandem.roles.batching import Batching
from tandem.roles.loss import Loss
from tandem.roles.train_group import TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.rollout.hf import HfEngine
from tandem.train.engine import FsdpEngine
from tandem.train.objective import PolicyObjective
from tests.roles.rank_processes import group_of
from tests.train.conftest import GPT2, LLAMA, build_batch, build_engine
from tests.train.test_routers import QWEN3, with_routes

LENGTHS = [7, 2, 30, 4, 9, 1, 12, 5]
AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-mean"]


def build(mesh: DeviceMesh | None = None, **options: Any) -> FsdpEngine:
    return build_engine(**{"mesh": mesh, "max_tokens": 60, "shape": GPT2, "double": True, **options})


def actor_of(
    ranks: TrainGroup | None = None, groups: int = 4, epochs: int = 1, *, reference: bool = True, **options: Any
) -> Actor:
    if ranks is None:
        ranks = TrainGroup.in_process(build(**options), deadline_s=60)
    return Actor(ranks, Batching(groups, epochs, seed=3), keep_reference=reference)


def weights(actor: Actor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.export()}


def assert_close(a: Actor, b: Actor, tolerance: float = 1e-9) -> None:
    others = weights(b)
    for name, tensor in weights(a).items():
        torch.testing.assert_close(tensor, others[name], atol=tolerance, rtol=tolerance)


def distance(actor: Actor, before: dict[str, torch.Tensor]) -> float:
    return max(float((tensor - before[name]).abs().max()) for name, tensor in weights(actor).items())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_accumulated_slices_give_the_update_of_the_whole(aggregation: str) -> None:
    """Also where a slice has nothing to train, and in whatever order slices come."""
    batch = build_batch(LENGTHS)
    mask = batch.ragged("response_mask")
    batch.batch["response_mask"] = mask.like(mask.values & (torch.arange(8).repeat_interleave(mask.lengths) < 6))
    objective = PolicyObjective(aggregation=aggregation, kl_coef=0.1, entropy_coef=0.01)
    whole, sliced = actor_of(), actor_of()
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        expected = whole.step(Loss(batch, objective))
        for group in order:
            sliced.ref_logprobs(batch[2 * group : 2 * group + 2].select("prompts", "responses", "response_mask"))
            sliced.accumulate(Loss(batch[2 * group : 2 * group + 2], objective))
        found = sliced.apply(objective.denominator(batch))
        assert found == pytest.approx(expected)
        assert_close(sliced, whole)
    assert (sliced.steps, sliced.updates) == (whole.steps, whole.updates) == (2, 2)


def test_slices_that_step_are_an_update_each_and_keep_the_old_policy() -> None:
    batch, objective = build_batch(LENGTHS), PolicyObjective()
    slices = [batch[i : i + 4] for i in (0, 4)]
    plain, sliced = actor_of(reference=False), actor_of(reference=False)
    asked = batch.select("prompts", "responses", "response_mask")
    for done in range(2):
        at_start = sliced.old_logprobs(asked).ragged("old_logprobs").values
        for part in slices:
            assert torch.equal(sliced.old_logprobs(asked).ragged("old_logprobs").values, at_start)
            sliced.step_slice(Loss(part, objective))
            plain.accumulate(Loss(part, objective))
            plain.apply(objective.denominator(part))
            assert_close(sliced, plain)
            assert sliced.steps == done
        metrics = sliced.end_slices()
        assert metrics["optim/applied"] == 2.0
        moved = sliced.old_logprobs(asked).ragged("old_logprobs").values
        assert not torch.equal(moved, at_start)
    assert (sliced.steps, sliced.updates) == (2, 4)


@pytest.mark.parametrize("world", [1, 2])
def test_any_number_of_ranks_gives_the_steps_of_one(tmp_path: Path, world: int) -> None:
    """Mini-batches have the same members, balanced or not: three steps of two passes over two mini-batches each."""
    objective = PolicyObjective(kl_coef=0.1)
    with group_of(world, partial(build), tmp_path, balance=world > 1) as ranks:
        one, many = actor_of(groups=2, epochs=2), actor_of(ranks, groups=2, epochs=2)
        for step in range(3):
            batch = build_batch(LENGTHS, seed=step)
            del batch.batch["old_logprobs"], batch.batch["ref_logprobs"]
            expected, found = (
                actor.step(Loss(actor.old_logprobs(actor.ref_logprobs(batch)), objective)) for actor in (one, many)
            )
            imbalance = found.pop("balance/max_over_mean", None)
            assert (imbalance is None) == (world == 1)
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)
            if step == 1:
                one.refresh_reference()
                many.refresh_reference()
        assert_close(many, one, 1e-6)
        assert (many.steps, many.updates) == (one.steps, one.updates) == (3, 12)


def test_old_logprobs_follow_the_weights_and_the_reference_does_not() -> None:
    batch = build_batch(LENGTHS)
    asked = batch.select("prompts", "responses", "response_mask", "group_ids", "sample_index")
    actor = actor_of()

    def logprobs(kind: Callable[[DataProto], DataProto], column: str) -> torch.Tensor:
        return kind(asked).ragged(column).values

    start = logprobs(actor.old_logprobs, "old_logprobs")
    assert torch.equal(logprobs(actor.ref_logprobs, "ref_logprobs"), start)
    actor.step(Loss(batch, PolicyObjective()))
    moved = logprobs(actor.old_logprobs, "old_logprobs")
    assert not torch.equal(moved, start)
    assert torch.equal(logprobs(actor.ref_logprobs, "ref_logprobs"), start)
    actor.refresh_reference()
    assert torch.equal(logprobs(actor.ref_logprobs, "ref_logprobs"), moved)


def test_a_step_in_which_nothing_is_trained_counts_and_changes_nothing() -> None:
    batch = build_batch(LENGTHS)
    mask = batch.ragged("response_mask")
    batch.batch["response_mask"] = mask.like(torch.zeros_like(mask.values))
    objective = PolicyObjective()
    actor = actor_of(groups=2)
    before = weights(actor)
    assert actor.step(Loss(batch, objective)) == {"optim/empty_mini_batches": 2.0}
    actor.accumulate(Loss(batch, objective))
    assert actor.apply(objective.denominator(batch)) == {"optim/empty_mini_batches": 1.0}
    actor.step_slice(Loss(batch, objective))
    assert actor.end_slices() == {"optim/empty_mini_batches": 1.0}
    assert (actor.steps, actor.updates) == (3, 0)
    assert distance(actor, before) == 0.0


def test_a_gradient_that_was_not_applied_is_not_lost_or_mixed_up(tmp_path: Path) -> None:
    batch, objective = build_batch(LENGTHS), PolicyObjective()
    actor = actor_of()
    actor.accumulate(Loss(batch, objective))
    calls: list[Callable[[], object]] = [
        actor.sleep,
        lambda: actor.step(Loss(batch, objective)),
        lambda: actor.step_slice(Loss(batch, objective)),
        lambda: actor.save(tmp_path, 1, facts={}, keep=1),
    ]
    for call in calls:
        with pytest.raises(ContractError, match="accumulated and not applied"):
            call()
    actor.apply(objective.denominator(batch))
    other = actor_of()
    other.step(Loss(batch, objective))
    assert_close(actor, other, 0.0)
    actor.sleep()
    actor.wake()


def test_b37_only_the_actors_own_weights_are_trained_exported_or_saved(tmp_path: Path) -> None:
    batch, objective = build_batch(LENGTHS), PolicyObjective()
    rank = TrainRank(build())
    rank.save_tag("ref")
    calls: list[Callable[[], object]] = [
        lambda: rank.forward_backward(batch, objective),
        lambda: rank.optim_step(1.0),
        rank.open_export,
        lambda: rank.next_bucket(1),
        lambda: rank.save_checkpoint(tmp_path, 1, {}, 1),
        lambda: rank.load_checkpoint(tmp_path),
    ]
    with rank.weights.using("ref"):
        for call in calls:
            with pytest.raises(ContractError, match="'ref' is in place"):
                call()


def test_a_saved_actor_goes_on_where_it_was(tmp_path: Path) -> None:
    batch, objective = build_batch(LENGTHS), PolicyObjective(kl_coef=0.1)

    def trained(actor: Actor, steps: int) -> Actor:
        for _ in range(steps):
            batch.batch.pop("ref_logprobs")
            batch.batch["ref_logprobs"] = actor.ref_logprobs(batch).ragged("ref_logprobs")
            actor.step(Loss(batch, objective))
        return actor

    actor = trained(actor_of(groups=2), 2)
    saved = actor.save(tmp_path, 2, facts={"cursor": 1}, keep=1)
    resumed = actor_of(groups=2, seed=8)
    resumed.load(saved)
    assert saved.read()["cursor"] == 1
    assert (resumed.steps, resumed.updates) == (2, 4)
    assert_close(trained(resumed, 2), trained(actor, 2), 0.0)


@pytest.mark.parametrize("kind", ["plain", "tied", "adapters"])
def test_an_engine_that_loaded_the_weights_answers_the_actors_fingerprint(kind: str) -> None:
    shape = LLAMA | {"tie_word_embeddings": kind == "tied"}
    plain = new_model(shape, seed=0)
    model = as_causal_lm(get_lora_model(plain, 4 if kind == "adapters" else 0))
    actor = actor_of(groups=8, model=model, double=False)
    served = HfEngine(as_causal_lm(new_model(shape, seed=1)), version=-1)
    seen = set()
    for version in range(2):
        assert served.load(actor.export(), version) == fingerprint(actor.export())
        seen.add(fingerprint(actor.export()))
        actor.step(Loss(build_batch(LENGTHS), PolicyObjective()))
    assert len(seen) == 2


def test_the_policy_goes_to_recorded_experts_and_the_reference_to_its_own() -> None:
    plain = build_batch([7, 2, 9, 4])
    recorded = with_routes(build_batch([7, 2, 9, 4]), seed=1)
    actor = actor_of(shape=QWEN3, double=False)
    found = []
    for batch in (recorded, plain):
        del batch.batch["ref_logprobs"], batch.batch["old_logprobs"]
        batch = actor.ref_logprobs(actor.old_logprobs(batch))
        found.append((batch.ragged("old_logprobs").values, batch.ragged("ref_logprobs").values))
    (old, ref), (own, own_ref) = found
    assert torch.equal(ref, own_ref) and torch.equal(own, own_ref)  # no weight has moved
    assert float((old - own).abs().max()) > 1e-2
