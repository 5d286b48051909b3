"""Rollout correction from its definition: plain float64, nothing of Tandem's.

Weights are ratios old / rollout; the bounds of a rejection are the reference's, of rollout / old. An answer's log-ratio
is the sum of its tokens', clamped once it is summed. Fractions of sequences are over those with trained tokens. Every
rejection judges the mask as given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.oracle.oracle_verdict import REFUSED, Right
from tests.oracle.right_loss import bounded, rounded

STATISTICS = {
    *(f"token_k{k}" for k in (1, 2, 3)),
    *(f"seq_{how}_k{k}" for how in ("sum", "mean", "max") for k in (1, 2, 3)),
} - {"seq_max_k1"}


@dataclass(frozen=True)
class Corrected:
    """Weights and what is left of the mask, (B, T), and metrics by the reference's names."""

    weights: list[list[float]] | None
    mask: list[list[bool]]
    metrics: dict[str, float]


def limits(threshold: Any) -> tuple[float | None, float]:
    """``2.0`` or ``"0.5_2.0"`` as (low, high)."""
    low, _, high = str(threshold).rpartition("_")
    return (float(low) if low else None), float(high)


def divergence(kind: str, gap: float) -> float:
    """k1, k2 or k3 of one token."""
    if kind == "k1":
        return gap
    return gap * gap / 2 if kind == "k2" else math.exp(bounded(gap, -20, 20)) - 1 - gap


def keeps(kind: str, value: float, low: float | None, high: float) -> bool:
    """Whether a statistic is within bounds: of k1 the ratio rollout / old, of the others the value itself."""
    if kind == "k1":
        ratio = math.exp(bounded(-value, -20, 20))
        return (1 / high if low is None else low) <= ratio <= high
    return value <= high


def rejected(name: str, low: float | None, high: float, rows: list[list[float]]) -> list[list[bool]]:
    """Per row and trained token whether it is lost."""
    how, _, kind = name.rpartition("_")
    lost = []
    for gaps in rows:
        values = [divergence(kind, gap) for gap in gaps]
        if how == "token":
            lost.append([not keeps(kind, value, low, high) for value in values])
            continue
        whole = math.fsum(values)
        value = {"seq_sum": whole, "seq_mean": whole / max(len(values), 1), "seq_max": max(values, default=0.0)}[how]
        lost.append([not keeps(kind, value, low, high)] * len(values))
    return lost


def weigh(given: Mapping[str, Any], rows: list[list[float]]) -> tuple[list[list[float]], dict[str, float]]:
    """The weights of the trained tokens and what is told of them."""
    floor, cap = limits(given.get("rollout_is_threshold", 2.0))
    if given["rollout_is"] == "sequence":
        rows = [[math.fsum(gaps)] * len(gaps) for gaps in rows]
    ratios = [[math.exp(bounded(gap, -20, 20)) for gap in gaps] for gaps in rows]
    low = 1 / cap if floor is None else floor
    if floor is None:
        weights = [[min(ratio, cap) for ratio in row] for row in ratios]
    else:
        weights = [[ratio if floor <= ratio <= cap else 0.0 for ratio in row] for row in ratios]
    # One entry per token, or per sequence with tokens, where a sequence has one ratio.
    once = (lambda table: [row[0] for row in table if row]) if given["rollout_is"] == "sequence" else flat
    tokens, entries = flat(weights), once(ratios)
    mean = math.fsum(tokens) / len(tokens)
    second = math.fsum(weight**2 for weight in tokens) / len(tokens)
    metrics = {
        "rollout_is_mean": mean,
        "rollout_is_std": math.sqrt(math.fsum((weight - mean) ** 2 for weight in tokens) / len(tokens)),
        "rollout_is_eff_sample_size": mean**2 / second if second else 0.0,
        "rollout_is_max": max(tokens),
        "rollout_is_min": min(tokens),
        "rollout_is_ratio_fraction_high": sum(ratio > cap for ratio in entries) / len(entries),
        "rollout_is_ratio_fraction_low": sum(ratio < low for ratio in entries) / len(entries),
    }
    if given.get("rollout_is_batch_normalize"):
        chosen = once(weights)
        typical = math.fsum(chosen) / len(chosen)
        weights = [[weight / (typical or 1.0) for weight in row] for row in weights]
    return weights, metrics


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def correct(given: Mapping[str, Any], old: torch.Tensor, rollout: torch.Tensor, response_mask: Any) -> Corrected | None:
    """What the settings make of (B, T) log-probs; None where they, or a partition without tokens, are refused."""
    mask: list[list[bool]] = response_mask.tolist()
    places = [[t for t, trained in enumerate(row) if trained] for row in mask]
    columns = zip(places, old.tolist(), rollout.tolist(), strict=True)
    rows = [[bounded(rounded(now[t] - before[t]), -80, 80) for t in chosen] for chosen, now, before in columns]
    gaps = flat(rows)
    level, names = given.get("rollout_is"), given.get("rollout_rs")
    floor, cap = limits(given.get("rollout_is_threshold") or 2.0)
    if not gaps or level not in (None, "token", "sequence") or not 0 <= (floor or 0.0) <= cap:
        return None
    metrics = {
        "kl": -math.fsum(gaps) / len(gaps),
        "k3_kl": math.fsum(math.exp(gap) - gap - 1 for gap in gaps) / len(gaps),
    }
    weights = None
    if level is not None:
        weights, of_weights = weigh(given, rows)
        metrics |= of_weights
    lost = [[False] * len(row) for row in rows]
    if names is not None:
        if given.get("rollout_rs_threshold") is None:
            return None
        statistics, thresholds = names.split(","), str(given["rollout_rs_threshold"]).split(",")
        thresholds *= len(statistics) if len(thresholds) == 1 else 1
        for name, threshold in zip(statistics, thresholds, strict=True):
            low = limits(threshold)[0]
            if name.strip() not in STATISTICS or (low is not None and not name.strip().endswith("k1")):
                return None
            more = rejected(name.strip(), *limits(threshold), rows)
            lost = [[a or b for a, b in zip(*pair, strict=True)] for pair in zip(lost, more, strict=True)]
    trained = [row for row in lost if row]
    metrics |= {
        "rollout_rs_masked_fraction": sum(map(sum, lost)) / len(gaps),
        "rollout_rs_seq_masked_fraction": sum(any(row) for row in trained) / len(trained),
    }
    left = laid(mask, places, [[not gone for gone in row] for row in lost], False)
    laid_weights = None if weights is None else laid(mask, places, weights, 0.0)
    return Corrected(laid_weights, left, {f"rollout_corr/{name}": value for name, value in metrics.items()})


def laid(mask: list[list[bool]], places: list[list[int]], values: list[list[Any]], fill: Any) -> list[list[Any]]:
    """Values of trained tokens at their places in (B, T), ``fill`` elsewhere."""
    table = [[fill] * len(row) for row in mask]
    for i, chosen in enumerate(places):
        for t, value in zip(chosen, values[i], strict=True):
            table[i][t] = value
    return table


def right_correction(given: Mapping[str, Any], old: torch.Tensor, rollout: torch.Tensor, mask: Any) -> Right:
    """As the reference names it."""
    found = correct(given, old, rollout, mask)
    if found is None:
        return REFUSED
    return {"rollout_is_weights": found.weights, "response_mask": found.mask, "metrics": found.metrics}
