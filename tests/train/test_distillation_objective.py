"""Distillation through the training engine: one result however the batch is cut, ordered, packed and dealt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tandem.columns.proto import DataProto
from tandem.models.head.logprobs import token_logprobs
from tandem.train.engine import FsdpEngine
from tandem.train.objective import Distillation, PolicyObjective
from tandem.train.protocol import TopTokens
from tests.train.conftest import VOCAB, build_batch, build_engine, gradients

MakeAny = Callable[..., Any]
K = 5
KINDS: dict[str, dict[str, Any]] = {
    "reverse_kl": {"discount": 0.5},
    "forward_kl_topk": {"top_k": K},
    "jsd_topk": {"top_k": K, "beta": 0.3},
}


def teacher(**options: Any) -> FsdpEngine:
    """Another model than the student, and surer of itself than fresh weights are."""
    engine = build_engine(seed=9, **options)
    with torch.no_grad():
        engine.model.model.get_output_embeddings().weight.mul_(20)
    return engine


def taught(lengths: list[int], group_size: int = 2, by: FsdpEngine | None = None) -> DataProto:
    """A batch with a teacher's columns; in each sample's middle a token that is not trained."""
    batch = build_batch(lengths, group_size=group_size)
    mask = batch.ragged("response_mask")
    trained = torch.ones(len(mask.values), dtype=torch.bool)
    trained[(mask.offsets[:-1] + mask.lengths // 2)[mask.lengths > 2]] = False
    batch.batch["response_mask"] = mask.like(trained)
    found = (teacher() if by is None else by).forward(batch, ["logprobs", TopTokens(K, VOCAB)])
    batch.batch["teacher_logprobs"] = found["logprobs"]
    batch.batch["teacher_topk_logprobs"], batch.batch["teacher_topk_ids"] = found["top_logprobs"], found["top_ids"]
    return batch


def objective(kind: str, **options: Any) -> PolicyObjective:
    return PolicyObjective(distillation=Distillation(kind, KINDS[kind], coef=0.7, **options))


def test_the_teachers_columns_are_its_own_distribution() -> None:
    batch, top = taught([4, 6, 3, 9]), TopTokens(K, VOCAB)
    for engine in (teacher(), teacher(max_tokens=14)):
        alone = engine.forward(batch, [top])
        torch.testing.assert_close(alone["top_logprobs"].values, batch.ragged("teacher_topk_logprobs").values)
        assert torch.equal(alone["top_ids"].values, batch.ragged("teacher_topk_ids").values)
    assert batch.ragged("teacher_topk_ids").dtype == torch.int32
    sampled, mask = batch.ragged("responses").values, batch.ragged("response_mask").values
    ids, values = (batch.ragged(f"teacher_topk_{part}").values for part in ("ids", "logprobs"))
    among = (ids == sampled[:, None]) & mask[:, None]
    assert bool(among.any())
    torch.testing.assert_close(
        values[among], batch.ragged("teacher_logprobs").values[among.any(1)], atol=1e-5, rtol=1e-5
    )
    assert bool((values[~mask] == 0).all())
    narrow = teacher().forward(batch, [TopTokens(3, 4)])["top_ids"].values
    assert int(narrow.max()) < 4


@pytest.mark.parametrize("kind", KINDS)
def test_columns_follow_from_the_kind(kind: str) -> None:
    teaching = objective(kind).columns
    given = {"teacher_logprobs"} if kind == "reverse_kl" else {"teacher_topk_logprobs", "teacher_topk_ids"}
    assert set(teaching) == {"advantages"} | given
    assert set(objective(kind, only=True).columns) == given


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("only", [True, False])
def test_micro_batches_order_and_chunks_change_no_gradient(
    kind: str, only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, target = taught([4, 6, 3, 9, 1, 7], group_size=3), objective(kind, only=only)
    results = []
    for max_tokens, rows, chunk in ((10_000, [0, 1, 2, 3, 4, 5], None), (14, [5, 1, 0, 4, 2, 3], 3 * VOCAB)):
        if chunk is not None:
            monkeypatch.setattr(
                "tandem.train.packed_engine.token_logprobs", partial(token_logprobs, chunk_elements=chunk)
            )
        engine = build_engine(max_tokens=max_tokens)
        total = engine.forward_backward(batch[rows], target)
        results.append((float(total.loss), gradients(engine), {n: m.mean for n, m in total.metrics.items()}))
    (loss, grads, metrics), (other_loss, other_grads, other_metrics) = results
    assert other_loss == pytest.approx(loss, rel=1e-4)
    assert other_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-5)
    assert "distill/kl" in metrics
    for name, grad in grads.items():
        torch.testing.assert_close(other_grads[name], grad, atol=2e-6, rtol=1e-3)


def test_distillation_adds_to_the_reward_or_replaces_it() -> None:
    """The gradient with both is the reward's plus 0.7 times the teacher's; without old log-probs the ratio is 1."""
    batch = taught([4, 6])
    del batch.batch["old_logprobs"]
    for kind in KINDS:
        found = []
        for target in (PolicyObjective(), objective(kind, only=True), objective(kind)):
            engine = build_engine()
            engine.forward_backward(batch, target)
            found.append(gradients(engine))
        for name, both in found[2].items():
            torch.testing.assert_close(found[0][name] + found[1][name], both, atol=1e-5, rtol=1e-3)
    without = batch.select(*(name for name in batch.columns if name != "advantages"))
    build_engine().forward_backward(without, objective("reverse_kl", only=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(kind: str) -> None:
    batch = taught([4, 6], by=build_engine())
    del batch.batch["old_logprobs"]
    engine = build_engine()
    total = engine.forward_backward(batch, objective(kind, only=True))
    assert total.metrics["distill/kl"].mean == pytest.approx(0, abs=1e-5)
    assert max(float(grad.abs().max()) for grad in gradients(engine).values()) < 1e-4


@pytest.mark.parametrize("kind", ["forward_kl_topk", "jsd_topk"])
def test_steps_bring_the_student_to_its_teacher(kind: str) -> None:
    batch = taught([8] * 32, group_size=1)
    del batch.batch["old_logprobs"]
    engine, target = build_engine(), objective(kind, only=True)
    gaps = []
    for _ in range(25):
        gaps.append(engine.forward_backward(batch, target).metrics["distill/kl"].mean)
        engine.optim_step(target.denominator(batch))
    assert gaps[-1] < 0.85 * gaps[0]


def test_two_ranks_give_the_update_of_one(on_ranks: MakeAny) -> None:
    """Also where one rank has no sample."""
    whole = taught([7, 2, 30], group_size=1)

    def body(mesh: DeviceMesh, rank: int) -> None:
        for kind in KINDS:
            target, single, sharded = objective(kind), build_engine(), build_engine(mesh=mesh)
            for split in ([[0, 1], [2]], [[0, 1, 2], []]):
                losses = []
                for engine, batch in ((single, whole), (sharded, whole[split[rank]])):
                    total = engine.forward_backward(batch, target)
                    norm = engine.optim_step(target.denominator(whole)).grad_norm
                    losses.append((float(total.loss), total.metrics["distill/kl"].mean, norm))
                assert losses[1] == pytest.approx(losses[0], rel=1e-3)
            found = sharded.forward(whole[split[rank]], [TopTokens(K, VOCAB)])["top_logprobs"]
            assert len(found) == len(split[rank])

    on_ranks(2, body)
