"""The clipped loss, aggregation, KL and its controllers: values, gradients, and cases of faults seen elsewhere.

Invariants of every registered loss are in ``test_every_loss``.
"""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithms.kl import KL_TYPES, AdaptiveKL, FixedKL, kl_in_reward, kl_per_token
from tandem.algorithms.metric import Metric
from tandem.algorithms.policy_loss import PolicyLoss, ppo_clip
from tandem.algorithms.reduce import Aggregation, LossCounts, count, denominator, loss_numerator
from tandem.base.errors import ContractError, UnknownNameError
from tests.algorithms.batches import splits

NORM = 7.0
MODES = list(Aggregation)


# -- the clipped loss --


def one_ratio(ratio: float, advantage: float, **parameters: float | None) -> tuple[float, float, PolicyLoss]:
    """Loss and gradient for one token."""
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    zeros, mask = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    result = ppo_clip(logprobs, zeros, zeros + advantage, mask, **parameters)
    result.per_token.sum().backward()
    assert logprobs.grad is not None
    return result.per_token.item(), logprobs.grad.item(), result


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the range
        (1.5, 2.0, -2.4, 0.0),  # clipped above: 1.2
        (0.5, 2.0, -1.0, -1.0),  # below the range, but the pessimistic side
        (0.5, -2.0, 1.6, 0.0),  # clipped below: 0.8
        (2.0, -2.0, 4.0, 4.0),  # bad and more likely: not clipped
        (5.0, -2.0, 6.0, 0.0),  # dual clip at 3
    ],
)
def test_ppo_clip_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    ours, slope, _ = one_ratio(ratio, advantage)
    assert ours == pytest.approx(loss)
    assert slope == pytest.approx(gradient)


def test_clip_ratio_sets_the_sides_that_are_not_given() -> None:
    assert one_ratio(1.5, 1.0, clip_ratio=0.4)[0] == pytest.approx(-1.4)
    assert one_ratio(1.5, 1.0, clip_ratio=0.4, clip_ratio_high=0.28)[0] == pytest.approx(-1.28)
    assert one_ratio(0.1, -1.0, clip_ratio=0.4, clip_ratio_high=0.28)[0] == pytest.approx(0.6)
    assert one_ratio(0.1, -1.0, clip_ratio_low=0.0)[0] == pytest.approx(1.0)


def test_dual_clip_can_be_turned_off_but_not_set_below_one() -> None:
    assert one_ratio(5.0, -2.0, clip_ratio_c=None)[0] == pytest.approx(10.0)
    with pytest.raises(ContractError, match=r"clip_ratio_c = 1\.0"):
        one_ratio(1.0, 1.0, clip_ratio_c=1.0)
    with pytest.raises(ContractError, match="not negative"):
        one_ratio(1.0, 1.0, clip_ratio_low=-0.1)


def test_clip_metrics_are_sums_that_add_up() -> None:
    clipped, dual = one_ratio(1.5, 2.0)[2].metrics, one_ratio(5.0, -2.0)[2].metrics
    both = {name: clipped[name] + dual[name] for name in clipped}
    assert both["clipfrac"].mean == 0.5
    assert both["clipfrac_lower"].mean == 0.5
    assert both["ppo_kl"].mean == pytest.approx(-(math.log(1.5) + math.log(5.0)) / 2)
    assert Metric(torch.tensor(0.0), torch.tensor(0)).mean == 0.0


# -- aggregation --


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_b17_token_mean_counts_tokens_of_the_whole_batch(parts: int) -> None:
    mask = torch.arange(90).unsqueeze(0) < torch.tensor([[10], [90], [0], [0]])
    losses = torch.zeros(4, 90).double()
    losses[0] = 1.0
    total, counts = 0.0, LossCounts()
    for rows in splits(4, parts):
        total += float(loss_numerator(losses[rows], mask[rows], "token-mean"))
        counts += count(mask[rows])
    assert total / denominator("token-mean", counts) == pytest.approx(0.1)


def test_b19_the_normalised_sum_does_not_see_the_padded_width() -> None:
    values, mask = torch.randn(3, 16).double(), torch.arange(16).unsqueeze(0) < torch.tensor([[16], [3], [9]])
    results = []
    for width in (32, 64):
        wide = torch.nn.functional.pad(values, (0, width - 16)).requires_grad_()
        wide_mask = torch.nn.functional.pad(mask, (0, width - 16))
        loss = loss_numerator(wide, wide_mask, "seq-mean-token-sum-norm")
        loss = loss / denominator("seq-mean-token-sum-norm", count(wide_mask), norm=20.0)
        results.append((loss.item(), torch.autograd.grad(loss, wide)[0][:, :16]))
    assert results[0][0] == pytest.approx(float(values[mask].sum()) / 60.0)
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("norm", [None, 0.0, -1.0])
def test_b19_the_normalised_sum_needs_its_constant(norm: float | None) -> None:
    with pytest.raises(ContractError, match="max_response_length"):
        denominator("seq-mean-token-sum-norm", LossCounts(3, 2), norm=norm)


def test_aggregations_by_hand() -> None:
    values, mask = (
        torch.tensor([[1.0, 3.0, 9.0], [5.0, 9.0, 9.0], [9.0, 9.0, 9.0]]),
        torch.zeros(3, 3, dtype=torch.bool),
    )
    mask[0, :2] = mask[1, 0] = True
    counts = count(mask)
    assert counts == LossCounts(tokens=3, sequences=2)
    got = {m: float(loss_numerator(values, mask, m)) / denominator(m, counts, norm=10.0) for m in MODES}
    assert got == pytest.approx(
        {
            "token-mean": 3.0,
            "token-sum": 9.0,
            "seq-mean-token-sum": 4.5,
            "seq-mean-token-mean": (2.0 + 5.0) / 2,
            "seq-mean-token-sum-norm": 0.45,
        }
    )


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_train_is_a_loss_of_zero(mode: Aggregation) -> None:
    values, mask = torch.full((2, 3), math.nan, requires_grad=True), torch.zeros(2, 3, dtype=torch.bool)
    loss = loss_numerator(values, mask, mode) / denominator(mode, count(mask), norm=NORM)
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad is not None
    assert not values.grad.any()


def test_an_unknown_aggregation_lists_the_near_ones() -> None:
    with pytest.raises(UnknownNameError, match="token-mean"):
        loss_numerator(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), "token-meen")


# -- KL --


def test_kl_estimators_by_hand() -> None:
    logprobs, reference = torch.tensor([[-1.0]]), torch.tensor([[-1.5]])
    mask = torch.ones(1, 1, dtype=torch.bool)
    got = {name: float(kl_per_token(name, logprobs, reference, mask)) for name in ("k1", "abs", "k2", "k3")}
    assert got == pytest.approx({"k1": 0.5, "abs": 0.5, "k2": 0.125, "k3": math.exp(-0.5) + 0.5 - 1})
    for alias, name in (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")):
        assert KL_TYPES[alias].target is KL_TYPES[name].target


@pytest.mark.parametrize("kind", [name for name in KL_TYPES.names() if name.endswith("+")])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind: str) -> None:
    reference, mask = torch.tensor([[-1.5, -0.2]]).double(), torch.ones(1, 2, dtype=torch.bool)
    logprobs = torch.tensor([[-1.0, -0.9]], dtype=torch.float64, requires_grad=True)
    value = kl_per_token(kind, logprobs, reference, mask)
    torch.testing.assert_close(value, kl_per_token(kind[:-1], logprobs, reference, mask))
    torch.testing.assert_close(torch.autograd.grad(value.sum(), logprobs)[0], (logprobs - reference).detach())


@pytest.mark.parametrize("kind", KL_TYPES.names())
def test_b21_masked_log_probs_do_not_reach_the_kl(kind: str) -> None:
    logprobs = torch.tensor([[-1.0, math.nan, -math.inf]], requires_grad=True)
    value = kl_per_token(
        kind, logprobs, torch.tensor([[-1.2, -math.inf, math.nan]]), torch.tensor([[True, False, False]])
    )
    value.sum().backward()
    assert bool(value.isfinite().all())
    assert logprobs.grad is not None
    assert bool(logprobs.grad.isfinite().all())


def test_kl_in_the_reward_is_subtracted_on_trained_tokens() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]])
    rewards = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    logprobs, reference = torch.full((2, 3), -1.0), torch.full((2, 3), -1.5)
    result = kl_in_reward(rewards, logprobs, reference, mask, kind="k1", coef=0.1)
    torch.testing.assert_close(result.token_rewards, torch.tensor([[-0.05, 0.95, 0.0], [0.0, 0.0, 0.0]]))
    assert result.kl.mean == pytest.approx(0.5)
    assert float(result.kl.count) == 1


def test_adaptive_controller_moves_towards_the_target_and_resumes() -> None:
    controller = AdaptiveKL(coef=0.2, target=6.0, horizon=1000)
    controller.update(60.0, 100)  # far above: clipped to +20 %
    assert controller.coef == pytest.approx(0.2 * (1 + 0.2 * 0.1))
    resumed = AdaptiveKL(coef=0.2, target=6.0, horizon=1000)
    resumed.load_state_dict(controller.state_dict())
    for each in (controller, resumed):
        each.update(5.7, 200)
    assert resumed.coef == controller.coef == pytest.approx(0.2 * 1.02 * (1 - 0.05 * 0.2))


def test_controllers_refuse_what_cannot_be_steered() -> None:
    with pytest.raises(ContractError, match="horizon"):
        AdaptiveKL(coef=0.1, target=1.0, horizon=0)
    with pytest.raises(ContractError, match="target"):
        AdaptiveKL(coef=0.1, target=0.0, horizon=10)
    with pytest.raises(ContractError, match="nan"):
        AdaptiveKL(coef=0.1, target=1.0, horizon=10).update(math.nan, 1)
    fixed = FixedKL(coef=0.1)
    fixed.update(100.0, 1)
    assert fixed.coef == 0.1
