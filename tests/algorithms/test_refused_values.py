"""Each parameter at the edge of its range: the last value that is taken and the first that is refused, by its name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from tandem.algorithms import ADVANTAGES, DISTILLATIONS, POLICY_LOSSES, PREFERENCE_LOSSES
from tandem.algorithms.kl import AdaptiveKL
from tandem.algorithms.policy_loss import ClipRange
from tandem.algorithms.reduce import LossCounts, denominator
from tandem.algorithms.rollout_correction import Rejection, Weighting
from tandem.algorithms.value_loss import value_loss
from tandem.base.errors import ContractError

MASK = torch.ones(2, 2, dtype=torch.bool)
LOGPROBS = torch.tensor([[-1.0, -2.0], [-0.5, -1.5]])
TOP = torch.full((2, 2, 3), math.log(0.25))
GIVEN: dict[str, torch.Tensor] = {
    "response_mask": MASK,
    "advantages": torch.tensor([[1.0, -1.0], [0.5, -0.5]]),
    "token_rewards": torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
    "group_ids": torch.tensor([3, 3]),
    "preferred": torch.tensor([True, False]),
    "reward_components": torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
    "reference_point": torch.zeros(2),
    "teacher_topk_logprobs": TOP,
    "student_topk_logprobs": TOP,
}


def run(registry: Any, name: str, **parameters: object) -> None:
    entry = registry[name]
    columns = {column: GIVEN.get(column, LOGPROBS) for column in entry.signature.columns}
    entry.target(**columns, **parameters)


LOSS, PREFERENCE, OBJECTIVE, ESTIMATOR = POLICY_LOSSES, PREFERENCE_LOSSES, DISTILLATIONS, ADVANTAGES


RANGES: list[tuple[Any, str, str, list[Any], list[Any]]] = [
    (LOSS, "ppo_clip", "clip_ratio_c", [None, 1.001], [1.0, 0.5]),
    (LOSS, "decoupled_ppo", "behaviour_cap", [None, 0.001], [0.0, -1.0]),
    (LOSS, "m2po", "m2_threshold", [0.001], [0.0, -1.0]),
    (LOSS, "dppo_tv", "clip_ratio_c", [0.001], [0.0, -1.0]),
    (LOSS, "dppo_kl", "clip_ratio_c", [0.001], [0.0, -1.0]),
    (LOSS, "sapo", "tau_pos", [0.001], [0.0, -1.0]),
    (LOSS, "sapo", "tau_neg", [0.001], [0.0, -1.0]),
    (LOSS, "dro", "dro_beta", [0.001], [0.0, -1.0]),
    (LOSS, "kl_cov", "kl_cov_ratio", [0.0, 1.0], [-0.001, 1.001]),
    (PREFERENCE, "dpo", "beta", [0.001], [0.0, -1.0]),
    (PREFERENCE, "dpo", "label_smoothing", [0.0, 0.499], [-0.001, 0.5]),
    (PREFERENCE, "ipo", "beta", [0.001], [0.0, -1.0]),
    (PREFERENCE, "orpo", "beta", [0.0], [-0.001]),
    (PREFERENCE, "simpo", "beta", [0.001], [0.0, -1.0]),
    (PREFERENCE, "kto", "beta", [0.001], [0.0, -1.0]),
    (PREFERENCE, "kto", "desirable_weight", [0.0], [-0.001]),
    (PREFERENCE, "kto", "undesirable_weight", [0.0], [-0.001]),
    (OBJECTIVE, "reverse_kl", "discount", [0.0, 1.0], [-0.001, 1.001]),
    (ESTIMATOR, "gpg", "f_norm", [0.001], [0.0, -1.0]),
    (OBJECTIVE, "jsd_topk", "beta", [0.001, 0.999], [0.0, 1.0, -1.0, 2.0]),
]


@pytest.mark.parametrize(
    ("registry", "name", "parameter", "taken", "refused"),
    [
        *RANGES,
        (OBJECTIVE, "forward_kl_topk", "top_k", [3], [2, 4]),
        (ESTIMATOR, "gdpo", "weights", [None, [1.0, 2.0]], [[1.0], [1.0, 2.0, 3.0]]),
    ],
)
def test_a_parameter_at_the_edge_of_its_range(
    registry: Any, name: str, parameter: str, taken: list[object], refused: list[object]
) -> None:
    others = {"top_k": 3} if name == "jsd_topk" else {}
    for value in taken:
        run(registry, name, **others, **{parameter: value})
    for value in refused:
        with pytest.raises(ContractError, match=parameter):
            run(registry, name, **others, **{parameter: value})


@pytest.mark.parametrize(("registry", "name", "parameter", "taken", "refused"), RANGES)
def test_the_declared_range_is_the_one_that_is_refused(
    registry: Any, name: str, parameter: str, taken: list[Any], refused: list[Any]
) -> None:
    """So the plan, which only reads the signature, refuses what the function would."""
    declared: TypeAdapter[Any] = TypeAdapter(registry[name].signature.parameters[parameter].annotation)
    for value in taken:
        assert declared.validate_python(value) == value
    for value in refused:
        with pytest.raises(ValidationError):
            declared.validate_python(value)


@pytest.mark.parametrize(
    ("make", "taken", "refused"),
    [
        (lambda v: ClipRange.of(v, None, None), [0.0], [-0.001]),
        (lambda v: ClipRange.of(0.2, v, None), [0.0], [-0.001]),
        (lambda v: ClipRange.of(0.2, None, v), [0.0], [-0.001]),
        (lambda v: value_loss(LOGPROBS, LOGPROBS, LOGPROBS, MASK, cliprange_value=v), [0.0], [-0.001]),
        (lambda v: AdaptiveKL(coef=1.0, target=v, horizon=1.0), [0.001], [0.0, -1.0]),
        (lambda v: AdaptiveKL(coef=1.0, target=1.0, horizon=v), [0.001], [0.0, -1.0]),
        (lambda v: AdaptiveKL(coef=1.0, target=1.0, horizon=1.0).update(v, 1), [0.0], [math.nan, math.inf]),
        (lambda v: denominator("seq-mean-token-sum-norm", LossCounts(1, 1), norm=v), [0.001], [0.0, -1.0, None]),
        (lambda v: Weighting(cap=v), [0.001], [0.0, -1.0]),
        (lambda v: Weighting(cap=2.0, floor=v), [0.0, 2.0], [-0.001, 2.001]),
        (lambda v: Rejection("token_k1", high=v), [0.001], [0.0, -1.0, None]),
        (lambda v: Rejection("token_k1", high=2.0, low=v), [0.001, 2.0, None], [0.0, 2.001]),
        (lambda v: Rejection("token_k2", high=2.0, low=v), [None], [0.5]),
        (lambda v: Rejection("seq_min_k1", low=v), [0.001], [0.0, -1.0, None]),
        (lambda v: Rejection("seq_min_k1", low=0.5, high=v), [None], [2.0]),
        (lambda v: Rejection("token_k1", quantile=v), [0.001, 0.999], [0.0, 1.0]),
        (lambda v: Rejection("token_k1", quantile=0.5, high=v), [None], [2.0]),
        (lambda v: Rejection("token_k1", quantile=0.5, low=v), [None], [0.5]),
    ],
)
def test_a_bound_at_the_edge_of_its_range(
    make: Callable[[Any], object], taken: list[object], refused: list[object]
) -> None:
    for value in taken:
        make(value)
    for value in refused:
        with pytest.raises(ContractError, match=r"write|give|find|leave low out"):
            make(value)
