"""Advantage estimators against the reference.

Compared on trained tokens only: outside the mask ours is 0 by contract (asserted here), the reference's is whatever its
arithmetic left there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tandem.algorithms import ADVANTAGES
from tandem.base.errors import TandemError
from tests.oracle.oracle_file import Case
from tests.oracle.oracle_verdict import DIFFERENCES, Answer, Difference, NotBuiltError, adapter

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
PARAMETERS = {"norm_adv_by_std_in_grpo": "norm_adv_by_std", "gamma": "gamma", "lam": "lam", "f_norm": "f_norm"}
GROUP_BASELINE = frozenset(
    [
        "grpo",
        "grpo_vectorized",
        "rloo",
        "rloo_vectorized",
        "grpo_passk",
        "gdpo",
        "opo",
        "gpg",
        "reinforce_plus_plus_baseline",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
    ]
)


def columns_of(case: Case) -> dict[str, torch.Tensor]:
    """The case's inputs as our columns."""
    columns = {ours: case.inputs[theirs] for ours, theirs in COLUMNS.items() if theirs in case.inputs}
    if "group_ids" in columns:
        known = sorted(set(columns["group_ids"]), key=str)
        columns["group_ids"] = torch.tensor([known.index(group) for group in case.inputs["index"]])
    if "reward_a" in case.inputs:
        parts = [torch.as_tensor(case.inputs[name], dtype=torch.float32) for name in ("reward_a", "reward_b")]
        columns["reward_components"] = torch.stack(parts, dim=-1)
    return columns | {"response_mask": case.mask()}


def estimate(case: Case, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Our estimator on ``columns``; asserts the contract outside the mask."""
    name = OURS.get(case.fn, case.fn)
    if name not in ADVANTAGES:
        raise NotBuiltError(f"advantage {name}")
    entry = ADVANTAGES[name]
    signature = entry.signature
    wanted = [c for c in signature.columns + signature.optional_columns if c in columns]
    parameters: dict[str, Any] = {o: case.inputs[t] for t, o in PARAMETERS.items() if t in case.inputs}
    if "weights" in signature.parameters:
        parameters["weights"] = case.inputs["weights"]
    parameters = {name: value for name, value in parameters.items() if name in signature.parameters}
    advantages, returns = entry.target(**{c: columns[c] for c in wanted}, **parameters)
    outside = ~columns["response_mask"]
    assert not advantages[outside].any(), "advantages are not 0 outside the mask"
    assert not returns[outside].any(), "returns are not 0 outside the mask"
    return advantages, returns


@adapter("advantage", "gae", "remax", "reinforce_plus_plus", *GROUP_BASELINE)
def advantage(case: Case) -> Answer:
    columns = columns_of(case)
    advantages, returns = estimate(case, columns)
    mask = columns["response_mask"]
    expected = dict(case.expected)
    if expected.get("returns") == "same as advantages":
        expected["returns"] = expected["advantages"]
    actual = {"advantages": advantages[mask], "returns": returns[mask]}
    return Answer(actual, None if case.refused else {name: expected[name][mask] for name in actual})


def empty_samples(case: Case) -> torch.Tensor:
    return ~case.mask().any(dim=-1)


def lonely_samples(case: Case) -> torch.Tensor:
    """Samples that have no peer with trained tokens in their group."""
    groups = columns_of(case)["group_ids"]
    peers = (groups.unsqueeze(0) == groups.unsqueeze(1)) & ~empty_samples(case)
    return peers.sum(dim=-1) < 2


def excluded_are_silent(case: Case, outcome: Answer | TandemError) -> bool:
    """Samples without a statistic get 0, and dropping the empty ones from the batch changes no advantage."""
    if isinstance(outcome, TandemError):
        return False
    columns = columns_of(case)
    keep = ~empty_samples(case)
    advantages, _ = estimate(case, columns)
    without, _ = estimate(case, {name: column[keep] for name, column in columns.items()})
    if not torch.allclose(advantages[keep], without, rtol=1e-5, atol=1e-6):
        return False
    silent = not advantages[lonely_samples(case)].any()
    return silent and bool(advantages.isfinite().all()) and unaffected_agree(case, advantages)


def unaffected_agree(case: Case, advantages: torch.Tensor) -> bool:
    """Groups with neither kind of sample equal the reference, for estimators that look at one group at a time."""
    if case.refused or ADVANTAGES[OURS.get(case.fn, case.fn)].scope > 2:
        return True
    groups = columns_of(case)["group_ids"]
    touched = groups[empty_samples(case) | lonely_samples(case)]
    rows = ~torch.isin(groups, touched)
    chosen = case.mask() & rows.unsqueeze(-1)
    return torch.allclose(advantages[chosen], case.expected["advantages"][chosen], rtol=1e-5, atol=1e-6)


def discounted_over_trained(case: Case, outcome: Answer | TandemError) -> bool:
    """Returns equal those of the sequence with its untrained tokens cut out, which has no holes to get wrong."""
    if isinstance(outcome, TandemError):
        return False
    rewards, mask, gamma = case.inputs["token_level_rewards"], case.mask(), case.inputs["gamma"]
    want = torch.zeros_like(rewards)
    for row in range(len(mask)):
        running = 0.0
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            running = float(rewards[row, t]) + gamma * running
            want[row, t] = running
    return torch.allclose(outcome.actual["returns"], want[mask], rtol=1e-5, atol=1e-6)


def baseline_where_two_compare(case: Case, outcome: Answer | TandemError) -> bool:
    """By a plain loop: positions that two samples of the group reach have the weighted mean, the others 0."""
    if isinstance(outcome, TandemError):
        return False
    columns, mask = columns_of(case), case.mask()
    returns = torch.where(mask, columns["token_rewards"], 0.0).flip(-1).cumsum(-1).flip(-1)
    energy = 1 - 2 * columns["old_logprobs"].exp() + columns["sum_pi_squared"]
    energy = energy * columns.get("tis_weights", torch.ones_like(energy)) ** 2
    weight = torch.where(mask, energy, 0.0).cumsum(-1)
    want = returns.clone()
    for row, position in mask.nonzero().tolist():
        peers = [
            i for i in range(len(mask)) if columns["group_ids"][i] == columns["group_ids"][row] and mask[i, position]
        ]
        if len(peers) > 1:
            weights = weight[peers, position]
            want[row, position] -= (returns[peers, position] * weights).sum() / weights.sum()
    return torch.allclose(outcome.actual["advantages"], want[mask], rtol=1e-4, atol=1e-5)


def within_float32(case: Case, outcome: Answer | TandemError) -> bool:
    """The difference is below the spacing of float32 numbers of the size of the rewards."""
    if isinstance(outcome, TandemError):
        return False
    spacing = torch.finfo(torch.float32).eps * float(case.inputs["token_level_rewards"].abs().max())
    gap = outcome.actual["advantages"] - case.expected["advantages"][case.mask()]
    return float(gap.abs().max()) <= spacing


def has_holes(case: Case) -> bool:
    """A trained token after an untrained one, as in a multi-turn response."""
    mask = case.mask().long()
    return bool((mask[:, 1:] > mask[:, :-1]).any())


Rule = Callable[[Case], bool]
with_groups: Rule = lambda case: "index" in case.inputs  # noqa: E731

DIFFERENCES += [
    Difference(
        "advantage",
        "a sample without a trained token moves nobody's baseline: left out of the statistics, it gets 0",
        lambda case: with_groups(case) and bool(empty_samples(case).any()),
        excluded_are_silent,
        GROUP_BASELINE,
    ),
    Difference(
        "advantage",
        "a sample without a peer in its group gets 0, not its raw score (and no error for the rest of the batch)",
        lambda case: with_groups(case) and bool(lonely_samples(case).any()),
        excluded_are_silent,
        GROUP_BASELINE,
    ),
    Difference(
        "advantage",
        "a tool result between turns does not cut the return of the tokens before it",
        has_holes,
        discounted_over_trained,
        frozenset({"reinforce_plus_plus"}),
    ),
    Difference(
        "advantage",
        "with tool results between turns, the reference takes a number of tokens for a position when it looks for the "
        "positions that only one sample reaches",
        has_holes,
        baseline_where_two_compare,
        frozenset({"optimal_token_baseline"}),
    ),
    Difference(
        "advantage",
        "statistics in float64: a large common offset costs no digits",
        lambda case: bool(case.inputs["token_level_rewards"].abs().max() >= 100),
        within_float32,
    ),
]
