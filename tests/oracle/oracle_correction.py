"""Rollout correction against the reference, also inside its ``bypass_mode`` loss.

The reference writes thresholds as "low_high" and lists as "a,b"; ours are typed, so they are parsed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tandem.algorithms.rollout_correction import Rejection, RolloutCorrection, Weighting, correct_rollout
from tandem.base.errors import ContractError
from tests.oracle.oracle_file import Case
from tests.oracle.oracle_loss import policy_columns, run_policy_loss
from tests.oracle.oracle_verdict import DIFFERENCES, REFUSED, Answer, Difference, Refused, Right, adapter
from tests.oracle.right_correction import correct, right_correction
from tests.oracle.right_loss import right_policy_loss

METRICS = {
    "kl": "mismatch_kl",
    "k3_kl": "mismatch_k3",
    "rollout_is_mean": "weight_mean",
    "rollout_is_std": "weight_std",
    "rollout_is_eff_sample_size": "weight_ess",
    "rollout_is_max": "weight_max",
    "rollout_is_min": "weight_min",
    "rollout_is_ratio_fraction_high": "above",
    "rollout_is_ratio_fraction_low": "below",
    "rollout_rs_masked_fraction": "rejected",
    "rollout_rs_seq_masked_fraction": "rejected_sequences",
}


def bounds(threshold: Any) -> tuple[float | None, float]:
    """(low, high) of ``2.0`` or ``"0.5_2.0"``."""
    low, _, high = str(threshold).rpartition("_")
    return (float(low) if low else None), float(high)


def weighting_of(given: Mapping[str, Any]) -> Weighting | None:
    if given.get("rollout_is") is None:
        return None
    floor, cap = bounds(given.get("rollout_is_threshold", 2.0))
    return Weighting(given["rollout_is"], cap, floor, bool(given.get("rollout_is_batch_normalize")))


def rejections_of(given: Mapping[str, Any]) -> list[Rejection]:
    """Theirs bound rollout / old, ours old / rollout: the sides change places, each as its inverse."""
    if given.get("rollout_rs") is None:
        return []
    if given.get("rollout_rs_threshold") is None:
        raise ContractError("a rejection needs a bound: ours can't be written without one")
    statistics, limits = given["rollout_rs"].split(","), str(given["rollout_rs_threshold"]).split(",")
    if len(limits) == 1:
        limits *= len(statistics)
    parsed = [(statistic.strip(), *bounds(limit)) for statistic, limit in zip(statistics, limits, strict=True)]
    return [
        Rejection(statistic, 1 / low, 1 / high)
        if statistic.endswith("k1") and low is not None
        else Rejection(statistic, high, low)
        for statistic, low, high in parsed
    ]


def named_metrics(result: RolloutCorrection, theirs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ours and theirs, of what both report."""
    names = {f"rollout_corr/{name}": ours for name, ours in METRICS.items() if f"rollout_corr/{name}" in theirs}
    return {name: result.metrics[ours] for name, ours in names.items()}, {name: theirs[name] for name in names}


@adapter("rollout_correction", "is_weights_and_rejection_mask", "invalid_config")
def rollout_correction(case: Case) -> Answer:
    given = case.inputs
    if given.get("rollout_is") is None:  # then the others say nothing
        given.get("rollout_is_threshold"), given.get("rollout_is_batch_normalize")
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
    ours, theirs = named_metrics(result, case.expected["metrics"])
    return Answer({**actual, "metrics": ours}, {**case.expected, "metrics": theirs})


BYPASS = {"ppo_clip": "vanilla", "reinforce": "gpg"}
OURS = {"vanilla": "ppo_clip", "gpg": "gpg"}


def left_counts(sizes: dict[str, Any], before: torch.Tensor, after: torch.Tensor) -> dict[str, Any]:
    """The global counts without what was rejected here: they were taken before."""
    lost = {
        "batch_num_tokens": int(before.sum()) - int(after.sum()),
        "global_batch_size": int(before.any(dim=-1).sum()) - int(after.any(dim=-1).sum()),
    }
    return {name: value - lost.get(name, 0) if value is not None else None for name, value in sizes.items()}


@adapter("policy_loss", "bypass_mode")
def bypass_mode(case: Case) -> Answer:
    """Ours has no such loss: it is a correction between rollout and current policy, then PPO's clip or the plain policy
    gradient. The reference's old log-probs are those of the rollout here."""
    settings = case.inputs["policy_loss_config"]["rollout_correction"].plain()
    columns = policy_columns(case)
    result = correct_rollout(
        columns["logprobs"],
        columns["old_logprobs"],
        columns["response_mask"],
        weighting=weighting_of(settings),
        rejections=rejections_of(settings),
    )
    name = OURS[BYPASS[settings["loss_type"]]]
    sizes = left_counts(case.inputs["global_batch_info"].plain(), columns["response_mask"], result.response_mask)
    columns["response_mask"] = result.response_mask
    if name == "gpg" and result.weights is not None:
        columns["tis_weights"] = result.weights
    actual = run_policy_loss(name, columns, case.inputs["loss_agg_mode"], sizes, case.inputs["config"].plain())
    if case.refused:
        return Answer(actual)
    ours, theirs = named_metrics(result, case.expected["metrics"])
    of_loss = {key: value for key, value in case.expected["metrics"].items() if key in actual["metrics"]}
    return Answer(
        {**actual, "metrics": {**actual["metrics"], **ours}},
        {**case.expected, "metrics": {**of_loss, **theirs}},
    )


def right_of_correction(case: Case) -> Right:
    given = case.inputs
    return right_correction(given, given["old_log_prob"], given["rollout_log_prob"], case.mask())


def right_bypass(case: Case) -> Right:
    """The correction, then the loss over what is left."""
    settings, columns = case.inputs["policy_loss_config"]["rollout_correction"], policy_columns(case)
    found = correct(settings, columns["logprobs"], columns["old_logprobs"], columns["response_mask"])
    if found is None:
        return REFUSED
    left = torch.tensor(found.mask)
    sizes = left_counts(case.inputs["global_batch_info"].plain(), columns["response_mask"], left)
    columns["response_mask"] = left
    name = BYPASS[settings["loss_type"]]
    if name == "gpg" and found.weights is not None:
        columns["tis_weights"] = torch.tensor(found.weights, dtype=torch.float64)
    loss = right_policy_loss(name, columns, case.inputs["loss_agg_mode"], sizes, case.inputs["config"].plain())
    return loss if isinstance(loss, Refused) else {**loss, "metrics": {**loss["metrics"], **found.metrics}}


def some_empty(case: Case) -> bool:
    mask = case.mask()
    return bool(mask.any()) and not bool(mask.any(dim=-1).all())


def far_apart(case: Case) -> bool:
    """A token's log-ratio is beyond 20."""
    given = case.inputs
    names = ("log_prob", "old_log_prob") if "log_prob" in given else ("old_log_prob", "rollout_log_prob")
    gap = (given[names[0]] - given[names[1]])[case.mask()]
    return bool((gap.abs() > 20).any())


CORRECTION = frozenset({"is_weights_and_rejection_mask"})
DIFFERENCES += [
    Difference(
        "rollout_correction",
        "fractions are of the sequences with trained tokens, not of empty rows, too",
        some_empty,
        right_of_correction,
        CORRECTION,
    ),
    Difference(
        "rollout_correction",
        "a sequence's log-ratio is summed first and clamped then, not token by token",
        far_apart,
        right_of_correction,
        CORRECTION,
    ),
    Difference(
        "rollout_correction",
        "the standard deviation of weights near 1 is computed in float64",
        lambda case: case.inputs.get("rollout_is") is not None,
        right_of_correction,
        CORRECTION,
    ),
    Difference(
        "policy_loss",
        "tokens and sequences are counted after all masking; fractions, clamps and deviations as in the correction",
        lambda case: True,
        right_bypass,
        frozenset({"bypass_mode"}),
    ),
]
