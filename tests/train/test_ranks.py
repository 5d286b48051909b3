"""One rank is the special case of many: same gradients, same weights, no rank ever waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from tandem.models.head.logprobs import token_logprobs
from tandem.train import checkpoint
from tandem.train.objective import PolicyObjective
from tandem.train.sharding import Traffic

MakeAny = Callable[..., Any]


@contextmanager
def chunked() -> Iterator[None]:
    """Three tokens' logits at a time: the backward computes logits again from gathered weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.train.packed_engine.token_logprobs", partial(token_logprobs, chunk_elements=3 * 23))
        yield


def step(engine: Any, batch: Any, objective: PolicyObjective, whole: Any) -> Any:
    total = engine.forward_backward(batch, objective)
    return total, engine.optim_step(objective.denominator(whole))


def close(a: Any, b: Any, tolerance: float = 1e-6) -> None:
    a, b = dict(a.export()), dict(b.export())
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], atol=tolerance, rtol=tolerance)


def test_a_mesh_of_one_rank_is_bit_equal_to_no_mesh(
    on_ranks: MakeAny, make_batch: MakeAny, make_engine: MakeAny
) -> None:
    batch, objective = make_batch([4, 6, 3, 9]), PolicyObjective(kl_coef=0.1)

    def body(mesh: DeviceMesh, rank: int) -> None:
        engines = [make_engine(mesh=m, max_tokens=14) for m in (None, mesh)]
        for _ in range(3):
            (loss, result), (sharded_loss, sharded_result) = (step(e, batch, objective, batch) for e in engines)
            assert torch.equal(loss.loss, sharded_loss.loss)
            assert result == sharded_result
        logprobs = [engine.forward(batch, ["logprobs"])["logprobs"].values for engine in engines]
        assert torch.equal(*logprobs)
        weights = [dict(engine.export()) for engine in engines]
        assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())

    on_ranks(1, body)


def test_b64_three_samples_on_two_ranks_give_the_update_of_one(
    on_ranks: MakeAny, make_batch: MakeAny, make_engine: MakeAny
) -> None:
    """Also a rank without any sample, and a micro-batch more on one rank than on the other (B61)."""
    objective = PolicyObjective(aggregation="seq-mean-token-mean", kl_coef=0.1, entropy_coef=0.01)
    whole = make_batch([7, 2, 30], group_size=1)
    splits = ([[0, 1], [2]], [[0, 1, 2], []], [[1], [0, 2]])

    def body(mesh: DeviceMesh, rank: int) -> None:
        with chunked():
            single, sharded = make_engine(), make_engine(mesh=mesh, max_tokens=34)
            for split in splits:
                mine = whole[split[rank]]
                loss, result = step(single, whole, objective, whole)
                shared_loss, shared_result = step(sharded, mine, objective, whole)
                torch.testing.assert_close(loss.loss, shared_loss.loss)
                assert shared_loss.metrics["kl"].mean == pytest.approx(loss.metrics["kl"].mean, rel=1e-4)
                assert shared_result.grad_norm == pytest.approx(result.grad_norm, rel=1e-4)
                logprobs = sharded.forward(mine, ["logprobs"])["logprobs"].values
                expected = single.forward(whole, ["logprobs"])["logprobs"].take(
                    torch.tensor(split[rank], dtype=torch.int64)
                )
                torch.testing.assert_close(logprobs, expected.values, atol=2e-5, rtol=1e-4)
            close(single, sharded, 2e-5)

    on_ranks(2, body)


def test_b61_ranks_with_different_numbers_of_micro_batches_end(
    on_ranks: MakeAny, make_batch: MakeAny, make_engine: MakeAny
) -> None:
    """Five samples of 95 tokens beside five of 20, at a budget of 100 tokens."""
    objective = PolicyObjective()
    parts = [make_batch([91] * 5, group_size=1, seed=0), make_batch([16] * 5, group_size=1, seed=1)]

    def body(mesh: DeviceMesh, rank: int) -> None:
        engine = make_engine(mesh=mesh, max_tokens=100)
        engine.forward(parts[rank], ["logprobs"])
        engine.forward_backward(parts[rank], objective)
        assert engine.optim_step(535.0).applied

    on_ranks(2, body)


def test_b22_all_ranks_skip_where_one_has_a_nan(on_ranks: MakeAny, make_batch: MakeAny, make_engine: MakeAny) -> None:
    batch = make_batch([4, 4], group_size=1)

    def body(mesh: DeviceMesh, rank: int) -> None:
        mine = batch[[rank]]
        if rank == 1:
            mine.batch["advantages"] = mine.ragged("advantages").like(torch.full((4,), float("nan")))
        engine = make_engine(mesh=mesh)
        _, result = step(engine, mine, PolicyObjective(), batch)
        assert (result.applied, result.updates, result.skipped) == (False, 0, 1)

    on_ranks(2, body)


def test_a_checkpoint_of_two_ranks_goes_on_with_one(
    on_ranks: MakeAny, make_batch: MakeAny, make_engine: MakeAny, tmp_path: Path
) -> None:
    batch, objective, root = make_batch([7, 2, 5, 3], group_size=1), PolicyObjective(), tmp_path / "checkpoints"

    def first(mesh: DeviceMesh, rank: int) -> None:
        engine = make_engine(mesh=mesh)
        for _ in range(2):
            step(engine, batch[2 * rank : 2 * rank + 2], objective, batch)
        checkpoint.save(root, 2, tensors={"actor": engine.state_dict()}, facts={"ranks": 2}, keep=1)

    on_ranks(2, first)
    straight, resumed = make_engine(), make_engine(seed=7)
    for _ in range(2):
        step(straight, batch, objective, batch)
    found = checkpoint.latest(root)
    assert found is not None
    state = {"actor": resumed.state_dict()}
    found.load_tensors(state)
    resumed.load_state_dict(state["actor"])
    assert resumed.updates == 2
    for engine in (straight, resumed):
        step(engine, batch, objective, batch)
    close(straight, resumed, 2e-5)


def test_shards_are_copied_into_in_place(on_ranks: MakeAny, make_batch: MakeAny, make_engine: MakeAny) -> None:
    """What a weight tag does, whose shards were taken once, between forwards."""
    batch = make_batch([4, 6])

    def body(mesh: DeviceMesh, rank: int) -> None:
        engine, other = make_engine(mesh=mesh), make_engine(mesh=mesh, seed=4)
        live = engine.shards()
        kept = {name: tensor.clone() for name, tensor in live.items()}
        before = engine.forward(batch, ["logprobs"])["logprobs"].values
        expected = other.forward(batch, ["logprobs"])["logprobs"].values
        for name, tensor in live.items():
            tensor.copy_(other.shards()[name])
        swapped = engine.forward(batch, ["logprobs"])["logprobs"].values
        for name, tensor in live.items():
            tensor.copy_(kept[name])
        assert torch.equal(swapped, expected)
        assert torch.equal(engine.forward(batch, ["logprobs"])["logprobs"].values, before)

    on_ranks(2, body)


def test_traffic_in_bfloat16_and_summed_once_gives_the_gradients_of_one_rank_up_to_rounding(
    on_ranks: MakeAny, make_batch: MakeAny, make_engine: MakeAny, grads_of: MakeAny
) -> None:
    """Two samples on one rank beside one on the other, a micro-batch each: gradients are summed when they should be."""
    whole, objective = make_batch([7, 2, 9], group_size=1), PolicyObjective(kl_coef=0.1)
    low = torch.bfloat16
    every = {  # sums of each layer in two micro-batches, and the relative error of a gradient
        "plain": (Traffic(), 2, 1e-5),
        "once": (Traffic(once=True), 1, 1e-5),
        "reduced": (Traffic(reduced=low), 2, 0.01),
        "reduced once": (Traffic(reduced=low, once=True), 1, 0.01),
        "gathered": (Traffic(gathered=low), 2, 0.05),
        "everything": (Traffic(low, low, once=True), 1, 0.05),
    }

    def body(mesh: DeviceMesh, rank: int) -> None:
        mine, single = whole[[[0, 1], [2]][rank]], make_engine()
        single.forward_backward(whole, objective)
        expected = grads_of(single)
        for name, (traffic, sums, tolerance) in every.items():
            engine = make_engine(mesh=mesh, max_tokens=14, traffic=traffic)
            if traffic.gathered == low:
                engine.model.compute_dtype = low
            assert summed(partial(engine.forward_backward, mine, objective)) == 3 * sums, (
                name
            )  # two layers and the rest
            once = {weight: grad.full_tensor() for weight, grad in grads_of(engine).items()}
            assert once.keys() == expected.keys()
            for weight, grad in once.items():
                assert grad.dtype == torch.float32
                error = float((grad - expected[weight]).norm() / expected[weight].norm())
                rounded = tolerance > 1e-3
                assert (1e-4 if rounded else -1.0) < error < tolerance, (name, weight, error)
            engine.forward_backward(mine, objective)  # a second mini-batch's part before the step is added
            for weight, grad in grads_of(engine).items():
                torch.testing.assert_close(grad.full_tensor(), 2 * once[weight], atol=1e-4, rtol=0.01)
            assert engine.optim_step(objective.denominator(whole)).applied
            assert all(tensor.dtype == torch.float32 for _, tensor in engine.export()), name

    on_ranks(2, body)


def summed(work: Callable[[], Any]) -> int:
    """How often gradients of a layer, or of what is none, are summed over ranks in ``work``."""
    count = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return plain(*args, **kwargs)

    plain = _fsdp_param_group.foreach_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_param_group, "foreach_reduce", counted)
        work()
    return count
