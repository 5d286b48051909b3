"""Masked statistics, learning-rate schedules, log-probs of logits, and balancing by length."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tandem.algorithms import balance
from tandem.algorithms.masked import masked_mean, masked_var, masked_whiten
from tests.oracle.oracle_file import Case
from tests.oracle.oracle_verdict import DIFFERENCES, Answer, Difference, NotBuiltError, adapter
from tests.oracle.right_numeric import fewest_by_first_fit, right_schedule, steps_of


def built(module: str, name: str) -> Any:
    """``module.name``, or "not built"."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as missing:
        raise NotBuiltError(f"{module}.{name}") from missing


@adapter("numeric", "masked_mean")
def mean(case: Case) -> Answer:
    return Answer({"out": masked_mean(case.inputs["values"], case.mask("mask"))})


@adapter("numeric", "masked_mean_axis1")
def mean_per_row(case: Case) -> Answer:
    return Answer({"out": masked_mean(case.inputs["values"], case.mask("mask"), dim=1)})


@adapter("numeric", "masked_var")
def variance(case: Case) -> Answer:
    return Answer({"out": masked_var(case.inputs["values"], case.mask("mask"))})


@adapter("numeric", "masked_whiten", "masked_whiten_keep_mean")
def whiten(case: Case) -> Answer:
    """Compared on the selected entries: the reference leaves transformed padding behind, ours is 0 there."""
    mask = case.mask("mask")
    out = masked_whiten(case.inputs["values"], mask, keep_mean=case.fn.endswith("keep_mean"))
    return Answer({"out": out[mask]}, None if case.refused else {"out": case.expected["out"][mask]})


@adapter("numeric", "lr_schedule")
def lr_schedule(case: Case) -> Answer:
    lr_factor, given = built("tandem.train.schedule", "lr_factor"), case.inputs
    options = {"warmup_steps": given["num_warmup_steps"], "total_steps": given.get("num_training_steps")}
    if "min_lr_ratio" in given:
        options["min_ratio"] = given["min_lr_ratio"] or 0.0
    if given.get("num_cycles") is not None:
        options["cycles"] = given["num_cycles"]
    keys = [key for key in case.expected if key.startswith("lr_at_step_")] or ["lr_at_step_0_to_13"]
    return Answer({key: [lr_factor(given["kind"], step, **options) for step in steps_of(key)] for key in keys})


@adapter("numeric", "entropy_and_logprob")
def entropy_and_logprob(case: Case) -> Answer:
    """Our head works on hidden states: with an identity as weight they are the logits."""
    token_logprobs, head = (
        built("tandem.models.head.logprobs", "token_logprobs"),
        built("tandem.models.head.logprobs", "Head"),
    )
    logits, labels = case.inputs["logits"], case.inputs["labels"]
    identity = head(torch.eye(logits.shape[-1]))
    flat = logits.reshape(-1, logits.shape[-1])
    logprobs, entropies = token_logprobs(flat, identity, labels.reshape(-1), want_entropy=True)
    squares = built("tandem.models.head.logprobs", "sum_pi_squared")(flat, identity)
    shaped = {"entropy": entropies, "logprob": logprobs, "sum_pi_squared": squares}
    return Answer({name: values.reshape(labels.shape) for name, values in shaped.items()})


def covers_once(bins: list[list[int]], items: int) -> bool:
    return sorted(i for bin_ in bins for i in bin_) == list(range(items)) and all(bins)


@adapter("seqlen", "balanced_partitions")
def balanced_partitions(case: Case) -> Answer:
    """One of many optima: judged by its spread, which may not exceed the reference's."""
    lengths, k, equal = case.inputs["lengths"], case.inputs["k"], case.inputs["equal_size"]
    bins = balance.partition(lengths, k, equal_size=equal)
    assert covers_once(bins, len(lengths))
    assert len(bins) == k
    assert not equal or len({len(bin_) for bin_ in bins}) == 1
    spread = balance.spread(lengths, bins)
    if case.refused:
        return Answer({"spread_max_minus_min": spread})
    reference = case.expected["spread_max_minus_min"]
    return Answer({"excess": max(0, spread - reference)}, {"excess": 0})


@adapter("seqlen", "dynamic_micro_batches")
def dynamic_micro_batches(case: Case) -> Answer:
    """Judged by what matters: every sequence once, no bin empty or above the budget (the reference's may be), and no
    more bins than the reference or, where its own do not obey the budget, than first-fit packing."""
    lengths, budget = case.inputs["lengths"], case.inputs["max_token_len"]
    bins = balance.micro_batches(lengths, budget)
    assert covers_once(bins, len(lengths))
    assert max(sum(lengths[i] for i in bin_) for bin_ in bins) <= budget
    if case.refused:
        return Answer({"bins": bins})
    obeys = max(case.expected["tokens"]) <= budget
    enough = case.expected["num_micro_batches"] if obeys else fewest_by_first_fit(lengths, budget)
    return Answer({"excess": max(0, len(bins) - enough)}, {"excess": 0})


@adapter("seqlen", "reverse_index")
def reverse_index(case: Case) -> Answer:
    return Answer({"reverse": balance.reverse_index(case.inputs["idx"])})


@adapter("seqlen", "group_balanced")
def group_balanced(case: Case) -> Answer:
    """Whole groups, as many in each bin, and a spread not above the reference's."""
    lengths, groups, k = case.inputs["lengths"], case.inputs["uid"], case.inputs["k"]
    bins = balance.partition_groups(lengths, groups, k)
    assert covers_once(bins, len(lengths))
    assert len({len({groups[i] for i in bin_}) for bin_ in bins}) == 1
    owners = {group: [b for b, bin_ in enumerate(bins) if any(groups[i] == group for i in bin_)] for group in groups}
    assert all(len(bins_of_group) == 1 for bins_of_group in owners.values())
    if case.refused:
        return Answer({"bins": bins})
    reference = balance.spread(lengths, case.expected["partitions"])
    return Answer({"excess": max(0, balance.spread(lengths, bins) - reference)}, {"excess": 0})


DIFFERENCES.append(
    Difference(
        "numeric",
        "from its end on a schedule is held at the minimum",
        lambda case: case.inputs["kind"] != "constant" and not case.refused,
        right_schedule,
        frozenset({"lr_schedule"}),
    )
)
