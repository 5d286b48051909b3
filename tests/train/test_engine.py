"""One update, whatever it was cut into; skipped where it can't be taken; learning in the right direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.config.model import OptimConfig
from tandem.train.engine import FsdpEngine
from tandem.train.objective import PolicyObjective, SftObjective

MakeBatch = Callable[..., DataProto]
MakeEngine = Callable[..., FsdpEngine]
Grads = Callable[[FsdpEngine], dict[str, torch.Tensor]]

AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def weights(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=10),
    seed=st.integers(0, 99),
    budget=st.sampled_from([16, 33, 70]),
    aggregation=st.sampled_from(AGGREGATIONS),
)
def test_b17_b18_gradients_do_not_depend_on_splits_or_order(
    make_batch: MakeBatch,
    make_engine: MakeEngine,
    grads_of: Grads,
    gpt2: dict[str, Any],
    lengths: list[int],
    seed: int,
    budget: int,
    aggregation: str,
) -> None:
    batch = make_batch(lengths, group_size=3, seed=seed)
    objective = PolicyObjective(aggregation=aggregation, norm=7.0, kl_coef=0.1, entropy_coef=0.01)
    results = []
    generator = torch.Generator().manual_seed(seed)
    shuffled = batch.reorder(torch.randperm(len(batch), generator=generator))
    for which, tokens, most in (
        (batch, 10_000, None),
        (batch, budget, None),
        (shuffled, budget, None),
        (batch, 10_000, 2),
    ):
        engine = make_engine(gpt2, double=True, max_tokens=tokens, max_samples_per_micro_batch=most)
        total = engine.forward_backward(which, objective)
        assert objective.denominator(which) == objective.denominator(batch)
        results.append((total, grads_of(engine)))
    (first, grads), *others = results
    for total, other in others:
        torch.testing.assert_close(total.loss, first.loss, atol=1e-10, rtol=1e-10)
        assert total.metrics.keys() == first.metrics.keys()
        for name, metric in total.metrics.items():
            assert metric.mean == pytest.approx(first.metrics[name].mean, abs=1e-9)
        for name, grad in other.items():
            torch.testing.assert_close(grad, grads[name], atol=1e-10, rtol=1e-10)


def test_b17_token_mean_counts_tokens_not_samples_or_micro_batches(
    make_batch: MakeBatch, make_engine: MakeEngine
) -> None:
    """Of 100 tokens, the 10 of one sample have loss 1, the 90 of the other 0: the loss is 0.1 for every split."""
    batch = make_batch([10, 90], group_size=1)
    responses = batch.ragged("responses")
    batch.batch["advantages"] = responses.like(torch.cat([-torch.ones(10), torch.zeros(90)]))
    del batch.batch["old_logprobs"]
    objective = PolicyObjective()
    for tokens in (10_000, 94):
        total = make_engine(max_tokens=tokens).forward_backward(batch, objective)
        assert float(total.loss) / objective.denominator(batch) == pytest.approx(0.1)


def test_b19_the_norm_is_a_constant_whatever_the_batch_is_padded_to(
    make_batch: MakeBatch, make_engine: MakeEngine, grads_of: Grads
) -> None:
    objective = PolicyObjective(aggregation="seq-mean-token-sum-norm", norm=50.0)
    short = make_batch([3, 5], group_size=2)
    wide = DataProto.concat([short, make_batch([40, 40], group_size=2, seed=1)])
    wide.batch["group_ids"] = torch.tensor([0, 0, 1, 1])
    wide.batch["advantages"] = wide.ragged("advantages").like(
        torch.cat([short.ragged("advantages").values, torch.zeros(80)])
    )
    grads = []
    for batch in (short, wide):
        engine = make_engine()
        engine.forward_backward(batch, objective)
        grads.append(grads_of(engine))
    assert objective.denominator(short) == 100.0
    assert objective.denominator(wide) == 200.0
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=1e-6, rtol=1e-4)


def test_b21_nan_in_a_masked_slot_changes_nothing(
    make_batch: MakeBatch, make_engine: MakeEngine, grads_of: Grads
) -> None:
    batch = make_batch([4, 6])
    mask = batch.ragged("response_mask").values.clone()
    mask[[1, 5]] = False
    batch.batch["response_mask"] = batch.ragged("responses").like(mask)
    objective = PolicyObjective(kl_coef=0.1)
    grads = []
    for poison in (0.0, float("nan")):
        for column in ("old_logprobs", "ref_logprobs", "advantages"):
            values = batch.ragged(column).values.clone()
            values[~mask] = poison
            batch.batch[column] = batch.ragged(column).like(values)
        engine = make_engine()
        total = engine.forward_backward(batch, objective)
        assert torch.isfinite(total.loss)
        grads.append(grads_of(engine))
    assert equal(*grads)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_b21_b22_a_non_finite_gradient_skips_the_step(
    make_batch: MakeBatch, make_engine: MakeEngine, poison: float
) -> None:
    """An unmasked NaN isn't hidden: the step is skipped and counted; weights, moments and schedule stay."""
    optim = OptimConfig(lr=1e-2, schedule="linear", warmup_steps=2)
    good, objective = make_batch([4, 6, 3, 5]), PolicyObjective()
    bad = good[:]
    values = good.ragged("advantages").values.clone()
    values[3] = poison
    bad.batch["advantages"] = good.ragged("advantages").like(values)

    def run(batches: list[DataProto]) -> tuple[FsdpEngine, list[bool], list[float]]:
        engine = make_engine(optim=optim)
        results = []
        for batch in batches:
            engine.forward_backward(batch, objective)
            results.append(engine.optim_step(objective.denominator(batch)))
        return engine, [r.applied for r in results], [r.lr for r in results]

    engine, applied, rates = run([good, good, bad, good, good])
    clean, _, clean_rates = run([good] * 4)
    assert applied == [True, True, False, True, True]
    assert (engine.updates, engine.skipped) == (4, 1)
    assert [rate for rate, took in zip(rates, applied, strict=True) if took] == clean_rates
    assert equal(weights(engine), weights(clean))


def test_a_batch_without_trained_tokens_is_skipped_not_divided_by_zero(
    make_batch: MakeBatch, make_engine: MakeEngine
) -> None:
    batch = make_batch([3, 0])
    batch.batch["response_mask"] = batch.ragged("responses").like(torch.zeros(3, dtype=torch.bool))
    engine, objective = make_engine(), PolicyObjective()
    before = weights(engine)
    total = engine.forward_backward(batch, objective)
    assert float(total.loss) == 0.0
    result = engine.optim_step(objective.denominator(batch))
    assert (result.applied, result.grad_norm, result.updates, result.skipped) == (False, 0.0, 0, 1)
    assert equal(before, weights(engine))


def test_b24_the_kl_is_minimised(make_batch: MakeBatch, make_engine: MakeEngine) -> None:
    batch = make_batch([6, 6, 6, 6])
    batch.batch["advantages"] = batch.ragged("advantages").like(torch.zeros(24))
    del batch.batch["old_logprobs"]
    reference = make_engine(seed=9).forward(batch, ["logprobs"])["logprobs"]
    batch.batch["ref_logprobs"] = reference
    engine, objective = make_engine(), PolicyObjective(kl_type="k3", kl_coef=1.0)
    kls = []
    for _ in range(5):
        kls.append(engine.forward_backward(batch, objective).metrics["kl"].mean)
        engine.optim_step(objective.denominator(batch))
    assert kls == sorted(kls, reverse=True)
    assert kls[-1] < kls[0]


def test_an_entropy_bonus_raises_entropy(make_batch: MakeBatch, make_engine: MakeEngine) -> None:
    batch, warm = make_batch([6] * 4), SftObjective()
    batch.batch["advantages"] = batch.ragged("advantages").like(torch.zeros(24))
    del batch.batch["old_logprobs"]
    engine, objective = make_engine(), PolicyObjective(entropy_coef=1.0)
    for _ in range(30):
        engine.forward_backward(batch, warm)
        engine.optim_step(warm.denominator(batch))
    engine = make_engine(model=engine.model)  # without the moments of the warm-up
    entropies = []
    for _ in range(5):
        entropies.append(engine.forward_backward(batch, objective).metrics["entropy"].mean)
        engine.optim_step(objective.denominator(batch))
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0]


def test_forward_gives_what_the_loss_sees_in_the_order_of_the_batch(
    make_batch: MakeBatch, make_engine: MakeEngine
) -> None:
    batch = make_batch([4, 0, 7, 2, 5, 1], group_size=3)
    mixed = [5, 0, 3, 1, 4, 2]
    engine = make_engine(max_tokens=17, temperature=0.7)
    straight = engine.forward(batch, ["logprobs", "entropies"])
    shuffled = engine.forward(batch.reorder(mixed), ["logprobs", "entropies"])
    for name, column in straight.items():
        assert column.dtype == torch.float32
        torch.testing.assert_close(shuffled[name].values, column.take(torch.tensor(mixed)).values)
    total = engine.forward_backward(batch, SftObjective())
    assert -float(straight["logprobs"].values.sum()) == pytest.approx(float(total.loss), rel=1e-5)


def test_exact_is_bit_equal_whatever_arrives_with_a_group(
    make_batch: MakeBatch, make_engine: MakeEngine, grads_of: Grads
) -> None:
    batch = make_batch([4, 9, 7, 2, 5, 1, 3, 3], group_size=2)
    engine = make_engine(exact=True)
    together = engine.forward(batch, ["logprobs"])["logprobs"]
    for group in range(4):
        alone = engine.forward(batch[2 * group : 2 * group + 2], ["logprobs"])["logprobs"]
        assert torch.equal(alone.values, together[2 * group : 2 * group + 2].values)
    grads = []
    for order in (list(range(8)), [7, 2, 0, 4, 6, 1, 3, 5]):
        engine = make_engine(exact=True)
        engine.forward_backward(batch.reorder(order), PolicyObjective())
        grads.append(grads_of(engine))
    assert equal(*grads)


def test_one_step_is_that_of_a_plain_loop(make_batch: MakeBatch, make_engine: MakeEngine) -> None:
    """Against torch.optim.AdamW and clip_grad_norm_ on a padded batch with the loss written out."""
    batch, objective = make_batch([5, 5, 5, 5]), SftObjective()
    optim = OptimConfig(lr=3e-3, weight_decay=0.1, grad_clip=0.5, betas=(0.8, 0.9), eps=1e-6)
    engine, plain = make_engine(optim=optim), make_engine().model.model
    plain.set_attn_implementation("sdpa")
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    vectors = [p for p in plain.parameters() if p.ndim == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=3e-3,
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    ids = torch.cat([batch.padded("prompts"), batch.padded("responses")], 1)
    for _ in range(3):
        engine.forward_backward(batch, objective)
        result = engine.optim_step(objective.denominator(batch))
        labels = ids.clone()
        labels[:, :4] = -100
        plain(input_ids=ids, labels=labels).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(dict(engine.export())[name], tensor, atol=2e-5, rtol=1e-4)


def test_gradient_checkpointing_changes_no_gradient(
    make_batch: MakeBatch, make_engine: MakeEngine, grads_of: Grads
) -> None:
    batch, grads = make_batch([4, 6]), []
    for checkpointing in (False, True):
        engine = make_engine(gradient_checkpointing=checkpointing)
        engine.forward_backward(batch, SftObjective())
        grads.append(grads_of(engine))
    assert equal(*grads)


def test_a_sample_above_the_token_budget_is_refused(make_batch: MakeBatch, make_engine: MakeEngine) -> None:
    with pytest.raises(ContractError, match="sample 1 has 24 tokens, a micro-batch holds 20"):
        make_engine(max_tokens=20).forward(make_batch([3, 20]), ["logprobs"])


def test_sleep_gives_gradients_up_and_wake_goes_on(make_batch: MakeBatch, make_engine: MakeEngine) -> None:
    batch, objective = make_batch([4, 6]), SftObjective()
    engines = [make_engine(), make_engine()]
    for i, engine in enumerate(engines):
        for _ in range(2):
            engine.forward_backward(batch, objective)
            engine.optim_step(objective.denominator(batch))
            if i:
                engine.forward_backward(batch, objective)
                engine.sleep()
                assert all(p.grad is None for p in engine.model.parameters())
                engine.wake()
    assert equal(*(weights(engine) for engine in engines))


def test_bfloat16_computes_near_float32_and_keeps_float32_weights(
    make_batch: MakeBatch, make_engine: MakeEngine
) -> None:
    batch = make_batch([6, 6, 6, 6])
    exact, coarse = make_engine(), make_engine()
    coarse.model.compute_dtype = torch.bfloat16
    a, b = (engine.forward(batch, ["logprobs"])["logprobs"].values for engine in (exact, coarse))
    assert not torch.equal(a, b)
    torch.testing.assert_close(a, b, atol=0.05, rtol=0.05)
    coarse.forward_backward(batch, SftObjective())
    assert coarse.optim_step(24.0).applied
    assert {tensor.dtype for _, tensor in coarse.export()} == {torch.float32}
