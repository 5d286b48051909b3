"""KL, loss aggregation and policy losses against the reference."""

from __future__ import annotations

from typing import Any

import torch

from tandem.algorithms import POLICY_LOSSES
from tandem.algorithms.kl import AdaptiveKL, kl_in_reward, kl_per_token
from tandem.algorithms.reduce import LossCounts, count, denominator, loss_numerator
from tandem.algorithms.value_loss import value_loss
from tandem.base.errors import ContractError, TandemError
from tests.oracle.oracle_file import Case
from tests.oracle.oracle_verdict import DIFFERENCES, Answer, Difference, NotBuiltError, adapter, mismatch


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


def reduced(per_token: torch.Tensor, mask: torch.Tensor, mode: str, sizes: dict[str, Any]) -> torch.Tensor:
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


def policy_columns(case: Case) -> dict[str, torch.Tensor]:
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


def run_policy_loss(
    name: str, columns: dict[str, torch.Tensor], mode: str, sizes: dict[str, Any], **given: Any
) -> Answer:
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
    return Answer({"loss": loss.detach(), "grad_log_prob": gradient, "metrics": metrics})


NAMES = ["vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo"]
OUR_MODE = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}
"""The reference forces this mode on them, whatever the config says."""


@adapter("policy_loss", *NAMES)
def policy_loss(case: Case) -> Answer:
    name = OURS.get(case.fn, case.fn)
    if name not in POLICY_LOSSES:
        raise NotBuiltError(f"policy loss {name}")
    given = {**case.inputs["config"], **case.inputs["policy_loss_config"]}
    sizes = dict(case.inputs["global_batch_info"])
    mode = OUR_MODE.get(case.fn, case.inputs["loss_agg_mode"])
    if case.fn == "geo_mean":  # it also divides by all rows, empty ones too, and knows no global counts
        sizes = {"global_batch_size": len(case.inputs["response_mask"])}
    answer = run_policy_loss(name, policy_columns(case), mode, sizes, **given)
    if case.refused:
        return answer
    metrics = case.expected["metrics"]
    expected = {key: metrics[key] for key in metrics if key in answer.actual["metrics"]}
    absent = {key: value for key, value in metrics.items() if key not in expected}
    assert not any(absent.values()), f"metrics that ours lacks, and that are not always 0: {absent}"
    return Answer(answer.actual, {**case.expected, "metrics": expected})


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


def finite_where_reference_is_not(case: Case, outcome: Answer | TandemError) -> bool:
    return isinstance(outcome, Answer) and all(
        bool(torch.as_tensor(v).isfinite().all()) for v in outcome.actual.values()
    )


def reference_is_nan(case: Case) -> bool:
    return not case.refused and bool(torch.as_tensor(case.expected["loss"]).isnan().any())


def mean_over_trained_sequences(case: Case, outcome: Answer | TandemError) -> bool:
    """The reference's mean counts empty sequences as KL 0; ours is over the others. All else agrees."""
    if isinstance(outcome, TandemError):
        return False
    mask, name = case.mask(), "actor/reward_kl_penalty"
    theirs = case.expected["metrics"][name] * len(mask) / int(mask.any(dim=-1).sum())
    return (
        mismatch(outcome.actual["token_level_rewards"], case.expected["token_level_rewards"], "rewards") is None
        and mismatch(outcome.actual["metrics"][name], theirs, name) is None
    )


DIFFERENCES += [
    Difference(
        "kl",
        "the KL that steers the controller is a mean over sequences with trained tokens, not over empty ones too",
        lambda case: case.fn == "apply_kl_penalty" and not bool(case.mask().any(dim=-1).all()),
        mean_over_trained_sequences,
    ),
    Difference(
        "agg",
        "NaN in masked padding stays out of the loss",
        lambda case: reference_is_nan(case) and bool(case.mask("loss_mask").any()),
        finite_where_reference_is_not,
    ),
    Difference(
        "agg",
        "nothing to train gives the loss 0, not 0/0",
        lambda case: reference_is_nan(case) and not bool(case.mask("loss_mask").any()),
        lambda case, outcome: isinstance(outcome, Answer) and float(outcome.actual["loss"]) == 0.0,
    ),
    Difference(
        "sft",
        "no label gives the loss 0, not 0/0",
        lambda case: case.fn == "sft_loss" and reference_is_nan(case),
        lambda case, outcome: isinstance(outcome, Answer) and float(outcome.actual["loss"]) == 0.0,
    ),
]
