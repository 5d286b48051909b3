"""Advantage estimators against the reference.

Compared on trained tokens only: outside the mask ours is 0 by contract (asserted here), the reference's is whatever its
arithmetic left there.
"""

from __future__ import annotations

from typing import Any

import torch

from tandem.algorithms import ADVANTAGES
from tests.oracle.oracle_file import Case
from tests.oracle.oracle_verdict import DIFFERENCES, Answer, Difference, NotBuiltError, adapter
from tests.oracle.right_advantage import DEFINITIONS, has_flat_group, right_advantages

OURS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
COLUMNS = {
    "token_rewards": "token_level_rewards",
    "group_ids": "index",
    "old_logprobs": "old_log_probs",
    "sum_pi_squared": "sum_pi_squared",
    "tis_weights": "rollout_is_weights",
    "values": "values",
    "reward_baselines": "reward_baselines",
}
PARAMETERS = {
    "norm_adv_by_std": "norm_adv_by_std_in_grpo",
    "gamma": "gamma",
    "lam": "lam",
    "f_norm": "f_norm",
    "weights": "weights",
}


def group_ids(case: Case) -> torch.Tensor:
    """The groups as numbers."""
    groups = case.inputs["index"]
    known = sorted(set(groups), key=str)
    return torch.tensor([known.index(group) for group in groups])


def column(case: Case, name: str) -> torch.Tensor | None:
    """What our column ``name`` holds in the case; only what an estimator takes is read."""
    if name == "response_mask":
        return case.mask()
    if name == "reward_components" and "reward_a" in case.inputs:
        parts = [torch.as_tensor(case.inputs[part], dtype=torch.float32) for part in ("reward_a", "reward_b")]
        return torch.stack(parts, dim=-1)
    if COLUMNS.get(name) not in case.inputs:
        return None
    if name == "group_ids":
        return group_ids(case)
    values: torch.Tensor = case.inputs[COLUMNS[name]]
    return values


def estimate(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Our estimator on the case's columns; asserts the contract outside the mask."""
    name = OURS.get(case.fn, case.fn)
    if name not in ADVANTAGES:
        raise NotBuiltError(f"advantage {name}")
    entry = ADVANTAGES[name]
    given = {n: column(case, n) for n in (*entry.signature.columns, *entry.signature.optional_columns)}
    taken = [
        ours for ours, theirs in PARAMETERS.items() if theirs in case.inputs and ours in entry.signature.parameters
    ]
    parameters: dict[str, Any] = {ours: case.inputs[PARAMETERS[ours]] for ours in taken}
    advantages, returns = entry.target(**{n: c for n, c in given.items() if c is not None}, **parameters)
    outside = ~case.mask()
    assert not advantages[outside].any(), "advantages are not 0 outside the mask"
    assert not returns[outside].any(), "returns are not 0 outside the mask"
    return advantages, returns


@adapter("advantage", "gae", *DEFINITIONS)
def advantage(case: Case) -> Answer:
    advantages, returns = estimate(case)
    mask = case.mask()
    expected = dict(case.expected)
    if expected.get("returns") == "same as advantages":
        expected["returns"] = expected["advantages"]
    actual = {"advantages": advantages[mask], "returns": returns[mask]}
    return Answer(actual, None if case.refused else {name: expected[name][mask] for name in actual})


def compares(case: Case) -> bool:
    """Whether samples of a group are compared."""
    return "index" in case.inputs and case.fn not in ("gae", "remax", "reinforce_plus_plus")


def empty(case: Case) -> bool:
    """Whether a sample has no trained token."""
    return not bool(case.mask().any(dim=-1).all())


def alone(case: Case) -> bool:
    """Whether a sample has no peer with trained tokens in its group."""
    groups = group_ids(case)
    peers = (groups.unsqueeze(0) == groups.unsqueeze(1)) & case.mask().any(dim=-1)
    return bool((peers.sum(dim=-1) < 2).any())


def has_holes(case: Case) -> bool:
    """A trained token after an untrained one, as in a multi-turn response."""
    mask = case.mask().long()
    return bool((mask[:, 1:] > mask[:, :-1]).any())


TOKEN_BASELINES = frozenset({"optimal_token_baseline", "tir_optimal_token_baseline"})
DIFFERENCES += [
    Difference(
        "advantage",
        "a sample without a trained token moves nobody's baseline: left out of the statistics, it gets 0",
        lambda case: compares(case) and empty(case),
        right_advantages,
    ),
    Difference(
        "advantage",
        "a sample without a peer in its group gets 0, not its raw score (and no error for the rest of the batch)",
        lambda case: compares(case) and alone(case),
        right_advantages,
    ),
    Difference(
        "advantage",
        "with tool results between turns, the reference takes a number of tokens for a position when it looks for the "
        "positions that only one sample reaches",
        has_holes,
        right_advantages,
        frozenset({"optimal_token_baseline"}),
    ),
    Difference(
        "advantage",
        "a group that no shared position tells apart gets 0, also where only its longest sample reaches",
        has_flat_group,
        right_advantages,
        TOKEN_BASELINES,
    ),
    Difference(
        "advantage",
        "statistics in float64: a large common offset costs no digits",
        lambda case: bool(case.inputs["token_level_rewards"].abs().max() >= 100),
        right_advantages,
    ),
    Difference(
        "advantage",
        "a token baseline is a mean, without an epsilon in its divisor",
        lambda case: True,
        right_advantages,
        TOKEN_BASELINES,
    ),
]
