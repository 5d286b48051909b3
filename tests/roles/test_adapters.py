"""Adapters as what is trained: the base is their reference, and any number of ranks makes the same of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.models.adapter_spec import AdapterSpec
from tandem.models.adapters import with_adapters
from tandem.models.fingerprint import fingerprint, joined
from tandem.models.loading import as_causal_lm, new_model
from tandem.models.lora import get_lora_model
from tandem.roles.actor import Actor
from tandem.roles.batching import Batching
from tandem.roles.loss import Loss
from tandem.roles.train_group import TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.stages.facts import REF
from tandem.train.engine import FsdpEngine
from tandem.train.objective import PolicyObjective
from tests.roles.rank_processes import group_of
from tests.train.conftest import LLAMA, build_batch, build_engine

LENGTHS = [7, 2, 30, 4, 9, 1, 12, 5]
COMPUTED = ("old_logprobs", "ref_logprobs")
LOSS = PolicyObjective(kl_coef=0.1, entropy_coef=0.01)


def adapted(mesh: DeviceMesh | None = None) -> FsdpEngine:
    model = as_causal_lm(get_lora_model(new_model(LLAMA, seed=0), 4, seed=5))
    return build_engine(model=model, mesh=mesh, max_tokens=40)


def in_half(mesh: DeviceMesh | None = None) -> FsdpEngine:
    """A base in bfloat16 under adapters in float32."""
    spec = AdapterSpec(rank=4, alpha=8.0, target_modules="all-linear", seed=5, base_dtype="bfloat16")
    model = as_causal_lm(with_adapters(new_model(LLAMA, seed=0), spec), dtype="bfloat16")
    return build_engine(model=model, mesh=mesh, max_tokens=40)


def actor_of(group: TrainGroup) -> Actor:
    return Actor(group, Batching(8, 1, seed=3), keep_reference=True, reference_is_base=True)


def without_logprobs(batch: DataProto) -> DataProto:
    return batch.select(*(name for name in batch.batch if name not in COMPUTED))


def test_the_reference_is_the_base_bit_by_bit_however_far_the_adapters_are(tmp_path: Path) -> None:
    plain = without_logprobs(batch := build_batch(LENGTHS))
    base = build_engine(max_tokens=40).forward(batch, ["logprobs"])["logprobs"].values
    for world in (0, 2):
        with group_of(world, adapted, tmp_path / str(world)) as group:
            actor = actor_of(group)
            for _ in range(2):
                actor.step(Loss(batch, LOSS))
            reference = actor.ref_logprobs(plain).ragged("ref_logprobs").values
            moved = actor.old_logprobs(plain).ragged("old_logprobs").values
            torch.testing.assert_close(reference, base, atol=1e-5 if world else 0.0, rtol=0.0)
            assert not torch.allclose(moved, base, atol=1e-3)
            status = group.every(TrainRank.status)
            assert all(rank.tags == (REF,) and rank.in_place == "actor" for rank in status)
            again = actor.step(Loss(batch, LOSS))  # the adapters learn as before
            assert again["optim/applied"] == 1


def test_a_refreshed_reference_is_what_the_adapters_were(tmp_path: Path) -> None:
    plain = without_logprobs(batch := build_batch(LENGTHS))
    with group_of(0, adapted, tmp_path) as group:
        actor = actor_of(group)
        actor.step(Loss(batch, LOSS))
        actor.refresh_reference()
        then = actor.old_logprobs(plain).ragged("old_logprobs").values
        actor.step(Loss(batch, LOSS))
        assert torch.equal(actor.ref_logprobs(plain).ragged("ref_logprobs").values, then)


def test_two_ranks_start_from_the_same_adapters_and_train_them_as_one_does(tmp_path: Path) -> None:
    batch = build_batch(LENGTHS)
    found = []
    for world in (0, 2):
        with group_of(world, adapted, tmp_path / str(world)) as group:
            actor = actor_of(group)
            start = {name: tensor.clone() for name, tensor in actor.export()}
            metrics = [actor.step(Loss(batch, LOSS)) for _ in range(3)]
            found.append((start, metrics, {name: tensor.clone() for name, tensor in actor.export()}))
    (start, metrics, end), (sharded_start, sharded_metrics, sharded_end) = found
    assert all(torch.equal(start[name], sharded_start[name]) for name in start)
    for one, two in zip(metrics, sharded_metrics, strict=True):
        assert two["loss/policy"] == pytest.approx(one["loss/policy"], rel=1e-4, abs=1e-6)
        assert two["grad/norm"] == pytest.approx(one["grad/norm"], rel=1e-4)
    moved = [name for name in end if not torch.equal(end[name], start[name])]
    assert len(moved) == 14  # every matrix of two layers, and nothing else
    for name in moved:
        torch.testing.assert_close(sharded_end[name], end[name], atol=2e-5, rtol=1e-4)


def test_two_ranks_hold_a_base_in_bfloat16_and_train_adapters_in_float32(tmp_path: Path) -> None:
    batch = build_batch(LENGTHS)
    found = []
    for world in (0, 2):
        with group_of(world, in_half, tmp_path / str(world)) as group:
            actor = actor_of(group)
            start = joined(fingerprint(actor.export("adapter")), group.call(TrainRank.base_fingerprint))
            metrics = [actor.step(Loss(batch, LOSS)) for _ in range(2)]
            base, adapters = dict(actor.export("base")), dict(actor.export("adapter"))
            assert all((tensor.dtype == torch.bfloat16) == ("base_layer" in name) for name, tensor in base.items())
            assert all(tensor.dtype == torch.float32 for tensor in adapters.values())
            found.append((start, metrics))
    (start, metrics), (sharded_start, sharded_metrics) = found
    assert start == sharded_start
    for one, two in zip(metrics, sharded_metrics, strict=True):
        assert two["loss/policy"] == pytest.approx(one["loss/policy"], abs=5e-3)
        assert two["grad/norm"] == pytest.approx(one["grad/norm"], rel=5e-2)


def test_a_checkpoint_of_two_ranks_goes_on_with_one(tmp_path: Path) -> None:
    batch = build_batch(LENGTHS)
    with group_of(2, adapted, tmp_path / "2") as group:
        actor = actor_of(group)
        actor.step(Loss(batch, LOSS))
        saved = actor.save(tmp_path / "checkpoints", 1, facts={}, keep=1)
        expected = actor.step(Loss(batch, LOSS))
        reference = actor.ref_logprobs(without_logprobs(batch)).ragged("ref_logprobs").values
    with group_of(0, adapted, tmp_path) as group:
        actor = actor_of(group)
        actor.load(saved)
        assert actor.step(Loss(batch, LOSS))["grad/norm"] == pytest.approx(expected["grad/norm"], rel=1e-4)
        again = actor.ref_logprobs(without_logprobs(batch)).ragged("ref_logprobs").values
        torch.testing.assert_close(again, reference, atol=1e-5, rtol=1e-5)


def test_a_whole_model_is_no_base_of_itself() -> None:
    with pytest.raises(ContractError, match="no adapters"):
        actor_of(TrainGroup.in_process(build_engine(), deadline_s=60))
