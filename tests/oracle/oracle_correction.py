"""Rollout correction against the reference, also inside its ``bypass_mode`` loss.

The reference writes thresholds as "low_high" and lists as "a,b"; ours are typed, so they are parsed here.
"""

from __future__ import annotations

from typing import Any

import torch

from tandem.algorithms.rollout_correction import Rejection, RolloutCorrection, Weighting, correct_rollout
from tandem.base.errors import ContractError, TandemError
from tests.oracle.oracle_file import Case
from tests.oracle.oracle_loss import policy_columns, run_policy_loss
from tests.oracle.oracle_verdict import DIFFERENCES, Answer, Difference, adapter, mismatch

METRICS = {
    "kl": "mismatch_kl",
    "k3_kl": "mismatch_k3",
    "rollout_is_mean": "weight_mean",
    "rollout_is_std": "weight_std",
    "rollout_is_eff_sample_size": "weight_ess",
    "rollout_is_ratio_fraction_high": "above",
    "rollout_is_ratio_fraction_low": "below",
    "rollout_rs_masked_fraction": "rejected",
    "rollout_rs_seq_masked_fraction": "rejected_sequences",
}
COUNT_EMPTY_ROWS = ("rollout_rs_seq_masked_fraction",)
"""Fractions that the reference takes over all rows, ours over rows with trained tokens."""


def bounds(threshold: Any) -> tuple[float | None, float]:
    """(low, high) of ``2.0`` or ``"0.5_2.0"``."""
    low, _, high = str(threshold).rpartition("_")
    return (float(low) if low else None), float(high)


def weighting_of(given: dict[str, Any]) -> Weighting | None:
    if given.get("rollout_is") is None:
        return None
    floor, cap = bounds(given.get("rollout_is_threshold", 2.0))
    return Weighting(given["rollout_is"], cap, floor, bool(given.get("rollout_is_batch_normalize")))


def rejections_of(given: dict[str, Any]) -> list[Rejection]:
    if given.get("rollout_rs") is None:
        return []
    if given.get("rollout_rs_threshold") is None:
        raise ContractError("a rejection needs a bound: ours can't be written without one")
    statistics, limits = given["rollout_rs"].split(","), str(given["rollout_rs_threshold"]).split(",")
    if len(limits) == 1:
        limits *= len(statistics)
    parsed = [(statistic.strip(), *bounds(limit)) for statistic, limit in zip(statistics, limits, strict=True)]
    return [Rejection(statistic, high, low) for statistic, low, high in parsed]


def named_metrics(
    case: Case, result: RolloutCorrection, theirs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ours and theirs, of what both report."""
    empty = not bool(case.mask().any(dim=-1).all())
    names = {
        f"rollout_corr/{name}": ours
        for name, ours in METRICS.items()
        if f"rollout_corr/{name}" in theirs and not (empty and name in COUNT_EMPTY_ROWS)
    }
    return {name: result.metrics[ours] for name, ours in names.items()}, {name: theirs[name] for name in names}


def same_variance(case: Case, outcome: Answer | TandemError) -> bool:
    """All agrees but the standard deviation, and its square is within the rounding of a float32 second moment."""
    name = "rollout_corr/rollout_is_std"
    if isinstance(outcome, TandemError) or outcome.expected is None:
        return False
    ours, theirs = dict(outcome.actual["metrics"]), dict(outcome.expected["metrics"])
    gap = abs(ours.pop(name) ** 2 - theirs.pop(name) ** 2)
    rest = mismatch({**outcome.actual, "metrics": ours}, {**outcome.expected, "metrics": theirs}, case.fn)
    second_moment = theirs["rollout_corr/rollout_is_mean"] ** 2
    return rest is None and gap <= 8 * torch.finfo(torch.float32).eps * second_moment


DIFFERENCES.append(
    Difference(
        "rollout_correction",
        "the standard deviation of weights near 1 is computed in float64",
        lambda case: case.inputs.get("rollout_is") is not None,
        same_variance,
    )
)


@adapter("rollout_correction", "is_weights_and_rejection_mask", "invalid_config")
def rollout_correction(case: Case) -> Answer:
    given = case.inputs
    weighting, rejections = weighting_of(given), rejections_of(given)
    result = correct_rollout(
        given["old_log_prob"],
        given["rollout_log_prob"],
        case.mask(),
        weighting=weighting,
        rejections=rejections,
    )
    actual = {"rollout_is_weights": result.weights, "response_mask": result.response_mask}
    if case.refused:
        return Answer(actual)
    ours, theirs = named_metrics(case, result, case.expected["metrics"])
    return Answer({**actual, "metrics": ours}, {**case.expected, "metrics": theirs})


@adapter("policy_loss", "bypass_mode")
def bypass_mode(case: Case) -> Answer:
    """Ours has no such loss: it is a correction between rollout and current policy, then PPO's clip or the plain policy
    gradient. The reference's old log-probs are those of the rollout here."""
    settings = case.inputs["policy_loss_config"]["rollout_correction"]
    columns = policy_columns(case)
    result = correct_rollout(
        columns["logprobs"],
        columns["old_logprobs"],
        columns["response_mask"],
        weighting=weighting_of(settings),
        rejections=rejections_of(settings),
    )
    name = {"ppo_clip": "ppo_clip", "reinforce": "gpg"}[settings["loss_type"]]
    columns["response_mask"] = result.response_mask
    if name == "gpg" and result.weights is not None:
        columns["tis_weights"] = result.weights
    sizes, mode = case.inputs["global_batch_info"], case.inputs["loss_agg_mode"]
    answer = run_policy_loss(name, columns, mode, sizes, **case.inputs["config"])
    if case.refused:
        return answer
    ours, theirs = named_metrics(case, result, case.expected["metrics"])
    of_loss = {key: value for key, value in case.expected["metrics"].items() if key in answer.actual["metrics"]}
    return Answer(
        {**answer.actual, "metrics": {**answer.actual["metrics"], **ours}},
        {**case.expected, "metrics": {**of_loss, **theirs}},
    )
