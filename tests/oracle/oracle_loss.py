"""KL, loss aggregation and policy losses against the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tandem.algorithms import POLICY_LOSSES
from tandem.algorithms.kl import AdaptiveKL, kl_in_reward, kl_per_token
from tandem.algorithms.reduce import LossCounts, count, denominator, loss_numerator
from tandem.algorithms.value_loss import value_loss
from tandem.base.errors import ContractError
from tests.oracle.oracle_file import Case
from tests.oracle.oracle_verdict import DIFFERENCES, Answer, Difference, NotBuiltError, Refused, Right, adapter
from tests.oracle.right_loss import right_aggregate, right_policy_loss, right_reward_penalty, right_sft


@adapter("kl", "kl_penalty")
def kl_penalty(case: Case) -> Answer:
    logprobs = case.inputs["logprob"].clone().requires_grad_()
    reference = case.inputs["ref_logprob"]
    value = kl_per_token(case.inputs["mode"], logprobs, reference, torch.ones_like(reference, dtype=torch.bool))
    value.sum().backward()
    return Answer({"value": value.detach(), "grad_logprob_of_sum": logprobs.grad})


@adapter("kl", "adaptive_kl_controller")
def adaptive_kl_controller(case: Case) -> Answer:
    given = case.inputs
    controller = AdaptiveKL(coef=given["init_kl_coef"], target=given["target_kl"], horizon=given["horizon"])
    coefficients = []
    for kl, samples in given["updates_kl_nsteps"]:
        controller.update(kl, samples)
        coefficients.append(controller.coef)
    return Answer({"coef_after_each_update": coefficients})


@adapter("kl", "apply_kl_penalty")
def apply_kl_penalty(case: Case) -> Answer:
    given = case.inputs
    result = kl_in_reward(
        given["token_level_scores"],
        given["old_log_probs"],
        given["ref_log_prob"],
        case.mask(),
        kind=given["mode"],
        coef=given["beta"],
    )
    metrics = {"actor/reward_kl_penalty": result.kl.mean, "actor/reward_kl_penalty_coeff": given["beta"]}
    return Answer({"token_level_rewards": result.token_rewards, "metrics": metrics})


def reduced(per_token: torch.Tensor, mask: torch.Tensor, mode: str, sizes: Mapping[str, Any]) -> torch.Tensor:
    """Our loss under the reference's calling convention: one rank of ``dp_size``, whose losses are averaged over ranks.

    There the counts of the global batch are optional on a single rank; ours always need them, and a constant for the
    normalised sum, for which the reference falls back to the padded width.
    """
    ranks = sizes.get("dp_size") or 1
    tokens, sequences = sizes.get("batch_num_tokens"), sizes.get("global_batch_size")
    if ranks > 1 and mode != "token-sum" and (tokens if mode == "token-mean" else sequences) is None:
        raise ContractError("the counts of the global batch are needed on more than one rank")
    local = count(mask)
    counts = LossCounts(local.tokens if tokens is None else tokens, local.sequences if sequences is None else sequences)
    norm = sizes.get("loss_scale_factor") or mask.shape[-1]
    return loss_numerator(per_token, mask, mode) / denominator(mode, counts, norm=norm) * ranks


@adapter("agg", "agg_loss")
def agg_loss(case: Case) -> Answer:
    loss = reduced(case.inputs["loss_mat"], case.mask("loss_mask"), case.inputs["mode"], case.inputs)
    return Answer({"loss": loss})


@adapter("sft", "sft_loss")
def sft_loss(case: Case) -> Answer:
    """Log-prob t is that of token t + 1: a sequence's mask is shifted left by one and ends with an untrained token."""
    rows = [torch.tensor(row, dtype=torch.float32) for row in case.inputs["log_prob_of_next_token"]]
    masks = [torch.tensor([*row[1:], 0], dtype=torch.bool) for row in case.inputs["loss_mask"]]
    logprobs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    return Answer({"loss": reduced(-logprobs, mask, "token-mean", case.inputs)})


METRICS = {"clipfrac": "actor/pg_clipfrac", "clipfrac_lower": "actor/pg_clipfrac_lower", "ppo_kl": "actor/ppo_kl"}
OURS = {"vanilla": "ppo_clip"}
Columns = dict[str, torch.Tensor]


def policy_columns(case: Case) -> Columns:
    """The case's inputs as our columns."""
    given = case.inputs
    columns = {
        "logprobs": given["log_prob"],
        "old_logprobs": given["old_log_prob"],
        "advantages": given["advantages"],
        "response_mask": case.mask(),
    }
    if "rollout_is_weights" in given:
        columns["tis_weights"] = given["rollout_is_weights"]
    return columns


def settings_of(case: Case) -> dict[str, Any]:
    """The parameters of the loss. One that no loss of ours has is refused: it would have no effect."""
    given = {**case.inputs["config"], **case.inputs["policy_loss_config"]}
    known = {name for loss in POLICY_LOSSES.names() for name in POLICY_LOSSES[loss].signature.parameters}
    if unknown := set(given) - known:
        raise NotBuiltError(f"parameter {sorted(unknown)[0]} of a policy loss")
    return given


def run_policy_loss(
    name: str, columns: Columns, mode: str, sizes: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Loss, its gradient and its metrics under the reference's names."""
    entry = POLICY_LOSSES[name]
    logprobs = columns["logprobs"].clone().requires_grad_()
    columns = {**columns, "logprobs": logprobs}
    wanted = entry.signature.columns + entry.signature.optional_columns
    parameters = {key: value for key, value in given.items() if key in entry.signature.parameters}
    if missing := [p.name for p in entry.signature.parameters.values() if p.required and p.name not in parameters]:
        raise ContractError(f"policy loss {name} needs {missing[0]}: the plan refuses a config without it")
    result = entry.target(**{c: columns[c] for c in wanted if c in columns}, **parameters)
    loss = reduced(result.per_token, columns["response_mask"], mode, sizes)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    metrics = {METRICS[key]: metric.mean for key, metric in result.metrics.items() if key in METRICS}
    return {"loss": loss.detach(), "grad_log_prob": gradient, "metrics": metrics}


def forced_sizes(case: Case) -> dict[str, Any] | None:
    """The counts by which the reference divides whatever the config says, with the mode ``FORCED``; None if it doesn't.

    ``geo_mean`` also counts empty rows, and knows no global counts.
    """
    if case.fn == "geo_mean":
        return {"global_batch_size": len(case.inputs["response_mask"])}
    return case.inputs["global_batch_info"].plain() if case.fn == "sapo" else None


FORCED = "seq-mean-token-mean"
NAMES = ["vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo"]


@adapter("policy_loss", *NAMES)
def policy_loss(case: Case) -> Answer:
    """Where the reference forces a mode, ours is compared with it in that, and with what is right in the case's."""
    name, columns, given = OURS.get(case.fn, case.fn), policy_columns(case), settings_of(case)
    if name not in POLICY_LOSSES:
        raise NotBuiltError(f"policy loss {name}")
    sizes = case.inputs["global_batch_info"].plain()
    actual = run_policy_loss(name, columns, case.inputs["loss_agg_mode"], sizes, given)
    if case.refused:
        return Answer(actual)
    told = case.expected["metrics"]
    expected = {**case.expected, "metrics": {key: told[key] for key in told if key in actual["metrics"]}}
    absent = {key: value for key, value in told.items() if key not in actual["metrics"]}
    assert not any(absent.values()), f"metrics that ours lacks, and that are not always 0: {absent}"
    if (forced := forced_sizes(case)) is not None:
        as_forced = run_policy_loss(name, columns, FORCED, forced, given)
        actual["in its mode"] = {key: as_forced[key] for key in ("loss", "grad_log_prob")}
        expected["in its mode"] = {key: case.expected[key] for key in ("loss", "grad_log_prob")}
    return Answer(actual, expected)


@adapter("policy_loss", "value_loss")
def critic_loss(case: Case) -> Answer:
    given = case.inputs
    predictions = given["vpreds"].clone().requires_grad_()
    result = value_loss(
        predictions, given["values"], given["returns"], case.mask(), cliprange_value=given["cliprange_value"]
    )
    loss = reduced(result.per_token, case.mask(), given["loss_agg_mode"], given)
    (gradient,) = torch.autograd.grad(loss, predictions)
    clipfrac = result.metrics["value_clipfrac"].mean
    return Answer({"loss": loss.detach(), "clipfrac": clipfrac, "grad_vpreds": gradient})


@adapter("policy_loss", "unknown_name")
def unknown_name(case: Case) -> Answer:
    return Answer({"entry": POLICY_LOSSES[case.inputs["name"]]})


def right_policy(case: Case) -> Right:
    """By the definition, in the mode and with the counts that the case gives."""
    given = {**case.inputs["config"], **case.inputs["policy_loss_config"]}
    columns, sizes = policy_columns(case), case.inputs["global_batch_info"].plain()
    right = right_policy_loss(case.fn, columns, case.inputs["loss_agg_mode"], sizes, given)
    forced = forced_sizes(case)
    if isinstance(right, Refused) or forced is None or not only_both_sides(case):
        return right
    return {**right, "in its mode": right_policy_loss(case.fn, columns, FORCED, forced, given)}


def only_both_sides(case: Case) -> bool:
    """``clip_ratio`` is given, and a side is not."""
    given = {**case.inputs["config"], **case.inputs["policy_loss_config"]}
    return "clip_ratio" in given and (given.get("clip_ratio_low") is None or given.get("clip_ratio_high") is None)


DIFFERENCES += [
    Difference(
        "kl",
        "the KL that steers the controller is a mean over sequences with trained tokens, not over empty ones too",
        lambda case: not bool(case.mask().any(dim=-1).all()),
        right_reward_penalty,
        frozenset({"apply_kl_penalty"}),
    ),
    Difference(
        "agg",
        "nothing to train gives the loss 0, not 0/0",
        lambda case: not case.refused and not bool(case.mask("loss_mask").any()),
        right_aggregate,
    ),
    Difference(
        "agg",
        "NaN in masked padding stays out of the loss",
        lambda case: not case.refused and bool(case.inputs["loss_mat"].isnan().any()),
        right_aggregate,
    ),
    Difference(
        "sft",
        "no label gives the loss 0, not 0/0",
        lambda case: not any(any(row[1:]) for row in case.inputs["loss_mask"]),
        right_sft,
        frozenset({"sft_loss"}),
    ),
    Difference(
        "policy_loss",
        "`clip_ratio` sets both sides, except where a side is given",
        only_both_sides,
        right_policy,
        frozenset(NAMES),
    ),
    Difference(
        "policy_loss",
        "the aggregation that the config says, and the global counts: none is forced, and empty rows do not count",
        lambda case: True,
        right_policy,
        frozenset({"sapo", "geo_mean"}),
    ),
    Difference(
        "policy_loss",
        "which tokens are drawn depends on the reference's global random state; ours is seeded by a parameter",
        lambda case: True,
        right_policy,
        frozenset({"clip_cov"}),
    ),
]
