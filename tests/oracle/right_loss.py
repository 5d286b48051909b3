"""KL, aggregation and policy losses with their gradients from the definitions: plain float64, nothing of Tandem's.

Columns hold float32 numbers, and so does the difference of two of them; all that follows is float64.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.oracle.oracle_file import Case
from tests.oracle.oracle_verdict import REFUSED, Right

Mask = list[list[bool]]
Column = list[list[float]]


def rounded(value: float) -> float:
    """The nearest float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def bounded(value: float, low: float, high: float) -> float:
    """``value`` within ``[low, high]``."""
    return min(max(value, low), high)


def share(mask: Mask, mode: str, sizes: Mapping[str, Any]) -> Column:
    """What the term of each token is multiplied by in the loss; 0 outside the mask."""
    lengths = [sum(row) for row in mask]
    tokens, sequences = sizes.get("batch_num_tokens"), sizes.get("global_batch_size")
    tokens = max(sum(lengths) if tokens is None else tokens, 1)
    sequences = max(sum(n > 0 for n in lengths) if sequences is None else sequences, 1)
    width = sizes.get("loss_scale_factor") or len(mask[0])
    ranks = sizes.get("dp_size") or 1
    divisor: dict[str, Callable[[int], float]] = {
        "token-mean": lambda n: tokens,
        "token-sum": lambda n: 1,
        "seq-mean-token-sum": lambda n: sequences,
        "seq-mean-token-mean": lambda n: sequences * n,
        "seq-mean-token-sum-norm": lambda n: sequences * width,
    }
    return [
        [ranks / divisor[mode](n) if trained else 0.0 for trained in row] for row, n in zip(mask, lengths, strict=True)
    ]


def total(terms: Column, weights: Column) -> float:
    """Sum of the terms times their weights, where the weight is not 0: what stands in padding is not touched."""
    return math.fsum(
        v * w for values, row in zip(terms, weights, strict=True) for v, w in zip(values, row, strict=True) if w
    )


def mean(terms: Column, mask: Mask) -> float:
    """Mean over the trained tokens; 0 of none."""
    return total(terms, share(mask, "token-mean", {}))


def right_aggregate(case: Case) -> Right:
    """``agg_loss``."""
    mask = case.mask("loss_mask").tolist()
    return {"loss": total(case.inputs["loss_mat"].tolist(), share(mask, case.inputs["mode"], case.inputs))}


def right_sft(case: Case) -> Right:
    """Negative log-likelihood of the labelled tokens; log-prob t is that of token t + 1."""
    terms = [
        -logprob
        for row, labels in zip(case.inputs["log_prob_of_next_token"], case.inputs["loss_mask"], strict=True)
        for logprob, label in zip(row, [*labels[1:], 0], strict=True)
        if label
    ]
    tokens = case.inputs.get("batch_num_tokens") or len(terms) or 1
    return {"loss": math.fsum(terms) / tokens * (case.inputs.get("dp_size") or 1)}


def kl(kind: str, logprob: float, reference: float) -> float:
    """The estimate of one token."""
    gap = rounded(logprob - reference)
    if kind in ("kl", "k1"):
        return gap
    if kind == "abs":
        return abs(gap)
    if kind in ("mse", "k2"):
        return gap * gap / 2
    back = bounded(-gap, -20, 20)
    return bounded(math.exp(back) - back - 1, -10, 10)


def right_reward_penalty(case: Case) -> Right:
    """``apply_kl_penalty``: the KL is a mean over the sequences that have trained tokens."""
    given, mask = case.inputs, case.mask().tolist()
    rewards, of_sequence = given["token_level_scores"].tolist(), []
    columns = zip(mask, given["old_log_probs"].tolist(), given["ref_log_prob"].tolist(), rewards, strict=True)
    for trained, logprobs, references, row in columns:
        found = [
            (t, kl(given["mode"].removesuffix("+"), logprobs[t], references[t])) for t, m in enumerate(trained) if m
        ]
        for t, value in found:
            row[t] -= given["beta"] * value
        if found:
            of_sequence.append(math.fsum(value for _, value in found) / len(found))
    metrics = {
        "actor/reward_kl_penalty": math.fsum(of_sequence) / max(len(of_sequence), 1),
        "actor/reward_kl_penalty_coeff": given["beta"],
    }
    return {"token_level_rewards": rewards, "metrics": metrics}


@dataclass(frozen=True)
class Token:
    """What the term of a token is made of. ``of_sequence``: mean log-ratio and mean advantage of its answer."""

    logprob: float
    old: float
    advantage: float
    weight: float
    of_sequence: tuple[float, float]

    @property
    def gap(self) -> float:
        """log(pi / pi_old)."""
        return rounded(self.logprob - self.old)


@dataclass(frozen=True)
class Term:
    """The loss of a token and its derivative by the token's log-prob, before weights; which metrics it counts in."""

    value: float
    slope: float
    clipped: bool = False
    lower: bool = False


@dataclass(frozen=True)
class Settings:
    """Parameters of a loss, with the defaults of the papers' code."""

    given: Mapping[str, Any]

    @property
    def low(self) -> float:
        """How far the ratio may fall; ``clip_ratio`` where no side is given."""
        return self._side("clip_ratio_low")

    @property
    def high(self) -> float:
        """How far it may rise."""
        return self._side("clip_ratio_high")

    def _side(self, name: str) -> float:
        own = self.given.get(name)
        return float(self.given.get("clip_ratio", 0.2) if own is None else own)

    def number(self, name: str, default: float) -> float:
        """Any other one."""
        return float(self.given.get(name, default))


def clipped_ratio(ratio: float, of: Settings) -> float:
    return bounded(ratio, 1 - of.low, 1 + of.high)


def clipped(ratio: float, slope: float, advantage: float, of: Settings) -> Term:
    """The larger of ``-A r`` and ``-A clip(r)``."""
    free, held = -advantage * ratio, -advantage * clipped_ratio(ratio, of)
    return Term(held, 0.0, True) if held > free else Term(free, -advantage * slope)


def ratio_of(token: Token, limit: float) -> tuple[float, float]:
    """The ratio and its derivative, which is 0 where the log-ratio is clamped."""
    ratio = math.exp(bounded(token.gap, -limit, limit))
    return ratio, ratio if abs(token.gap) <= limit else 0.0


def vanilla(token: Token, of: Settings) -> Term:
    term = clipped(*ratio_of(token, 20), token.advantage, of)
    bound = -token.advantage * of.number("clip_ratio_c", 3.0)
    if token.advantage < 0 and term.value > bound:
        return Term(bound, 0.0, term.clipped, True)
    return term


def gspo(token: Token, of: Settings) -> Term:
    gap = token.of_sequence[0]
    ratio = math.exp(min(gap, 10))
    return clipped(ratio, ratio if gap <= 10 else 0.0, token.advantage, of)


def sapo(token: Token, of: Settings) -> Term:
    tau = of.number("tau_pos", 1.0) if token.advantage > 0 else of.number("tau_neg", 1.05)
    ratio, slope = ratio_of(token, 20)
    gate = 1 / (1 + math.exp(-bounded(tau * (ratio - 1), -700, 700)))
    return Term(-token.advantage * 4 / tau * gate, -token.advantage * 4 * gate * (1 - gate) * slope)


def gpg(token: Token, of: Settings) -> Term:
    return Term(-token.advantage * token.logprob, -token.advantage)


def cispo(token: Token, of: Settings) -> Term:
    ratio = ratio_of(token, 20)[0]
    factor = clipped_ratio(ratio, of)
    return Term(-factor * token.advantage * token.logprob, -factor * token.advantage, factor != ratio)


def inside_region(token: Token, of: Settings, may_rise: bool, may_fall: bool) -> Term:
    ratio, cap = ratio_of(token, 20)[0], of.number("clip_ratio_c", 3.0)
    if not (may_rise if token.advantage > 0 else may_fall):
        return Term(0.0, 0.0, True)
    slope = -token.advantage * min(ratio, cap)
    return Term(slope * token.logprob, slope, False, ratio > cap)


def dppo_tv(token: Token, of: Settings) -> Term:
    change = math.exp(token.logprob) - math.exp(token.old)
    return inside_region(token, of, change <= of.high, change >= -of.low)


def dppo_kl(token: Token, of: Settings) -> Term:
    p, before = math.exp(token.logprob), math.exp(token.old)
    rest = (1 - before) * math.log((1 - before + 1e-8) / (1 - p + 1e-8))
    distance = before * (token.old - token.logprob) + rest
    return inside_region(token, of, distance <= of.high or p <= before, distance <= of.low or p >= before)


def dro(token: Token, of: Settings) -> Term:
    beta = of.given["dro_beta"]
    return Term(-token.advantage * token.logprob + beta / 2 * token.gap**2, -token.advantage + beta * token.gap)


def plain_ratio(token: Token, of: Settings) -> Term:
    ratio, slope = ratio_of(token, 80)
    return Term(-token.advantage * ratio, -token.advantage * slope)


def unbounded_clip(token: Token, of: Settings) -> Term:
    return clipped(*ratio_of(token, 80), token.advantage, of)


PER_TOKEN: dict[str, Callable[[Token, Settings], Term]] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "sapo": sapo,
    "gpg": gpg,
    "cispo": cispo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "clip_cov": unbounded_clip,
    "kl_cov": plain_ratio,
}


def tokens_of(columns: Mapping[str, torch.Tensor]) -> list[list[Token | None]]:
    """The trained tokens of (B, T) columns by our names; None elsewhere."""
    mask = columns["response_mask"].tolist()
    names = ("logprobs", "old_logprobs", "advantages")
    now, old, advantages = (columns[name].double().tolist() for name in names)
    weights = columns["tis_weights"].tolist() if "tis_weights" in columns else None
    rows: list[list[Token | None]] = []
    for i, trained in enumerate(mask):
        places = [t for t, m in enumerate(trained) if m]
        count = max(len(places), 1)
        gaps = [bounded(rounded(now[i][t] - old[i][t]), -80, 80) for t in places]
        of_row = math.fsum(gaps) / count, math.fsum(advantages[i][t] for t in places) / count
        row: list[Token | None] = [None] * len(trained)
        for t in places:
            row[t] = Token(now[i][t], old[i][t], advantages[i][t], weights[i][t] if weights else 1.0, of_row)
        rows.append(row)
    return rows


def covariances(rows: list[list[Token | None]]) -> dict[tuple[int, int], float]:
    """``(A - mean A)(log pi - mean log pi)`` of each trained token by its place."""
    found = {(i, t): token for i, row in enumerate(rows) for t, token in enumerate(row) if token}
    count = max(len(found), 1)
    level = math.fsum(token.advantage for token in found.values()) / count
    usual = math.fsum(token.logprob for token in found.values()) / count
    return {place: (token.advantage - level) * (token.logprob - usual) for place, token in found.items()}


def chosen_by_covariance(name: str, rows: list[list[Token | None]], terms: Any, of: Settings) -> set[tuple[int, int]]:
    """The tokens that ``clip_cov`` silences (its draw is that of torch's generator with seed 0) or ``kl_cov`` binds."""
    by_place = covariances(rows)
    if name == "clip_cov":
        low, high = of.number("clip_cov_lb", 1.0), of.number("clip_cov_ub", 5.0)
        candidates = [p for p, value in by_place.items() if low < value < high and not terms[p].clipped]
        wanted = max(int(of.number("clip_cov_ratio", 0.0002) * len(by_place)), 1)
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(0)).tolist()
        return {candidates[k] for k in order[:wanted]}
    ratio = of.number("kl_cov_ratio", 0.0002)
    wanted = max(1, int(len(by_place) * ratio)) if ratio > 0 else 0
    return set(sorted(by_place, key=by_place.__getitem__, reverse=True)[:wanted])


def right_policy_loss(
    name: str, columns: Mapping[str, torch.Tensor], mode: str, sizes: Mapping[str, Any], given: Mapping[str, Any]
) -> Right:
    """Loss, gradient by the log-probs, and metrics under the reference's names."""
    mask: Mask = columns["response_mask"].tolist()
    rows, of = tokens_of(columns), Settings(given)
    if name == "dro" and "dro_beta" not in given:
        return REFUSED
    if name == "geo_mean":
        return geometric_mean(rows, mask, share(mask, mode, sizes), of)
    terms = {(i, t): PER_TOKEN[name](token, of) for i, row in enumerate(rows) for t, token in enumerate(row) if token}
    if name in ("clip_cov", "kl_cov"):
        coef = of.number("ppo_kl_coef", 1.0)
        special = chosen_by_covariance(name, rows, terms, of)
        for place, term in terms.items():
            gap = rows[place[0]][place[1]].gap  # type: ignore[union-attr]
            if name == "clip_cov":
                silent = place in special
                terms[place] = Term(0.0 if silent else term.value, 0.0 if silent else term.slope, silent)
            elif place in special:
                sign = math.copysign(coef, gap) if gap else 0.0
                terms[place] = Term(term.value + coef * abs(gap), term.slope + sign)
    weights = share(mask, mode, sizes)
    value, slope, clip, lower, divergence = ([[0.0] * len(row) for row in mask] for _ in range(5))
    for (i, t), term in terms.items():
        token = rows[i][t]
        assert token is not None
        value[i][t], slope[i][t] = term.value * token.weight, term.slope * token.weight * weights[i][t]
        clip[i][t], lower[i][t] = float(term.clipped), float(term.lower)
        divergence[i][t] = -token.gap if name == "dro" else -bounded(token.gap, *limits(name))
    if name == "kl_cov":
        divergence = [[abs(x) for x in row] for row in divergence]
    metrics = {
        "actor/pg_clipfrac": mean(clip, mask),
        "actor/pg_clipfrac_lower": mean(lower, mask),
        "actor/ppo_kl": mean(divergence, mask),
    }
    return {"loss": total(value, weights), "grad_log_prob": slope, "metrics": metrics}


def limits(name: str) -> tuple[float, float]:
    """Where a loss clamps its log-ratios."""
    return (-80.0, 80.0) if name in ("gspo", "clip_cov", "kl_cov") else (-20.0, 20.0)


def geometric_mean(rows: list[list[Token | None]], mask: Mask, weights: Column, of: Settings) -> Right:
    """GMPO: each token carries ``-mean A exp(mean of its answer's log-ratios, clipped to where A pushes)``."""
    slope, value, clip, lower, divergence = ([[0.0] * len(row) for row in mask] for _ in range(5))
    for i, row in enumerate(rows):
        tokens = [(t, token) for t, token in enumerate(row) if token]
        held, free = [], []
        for t, token in tokens:
            gap, sign = bounded(token.gap, -80, 80), (token.advantage > 0) - (token.advantage < 0)
            kept = bounded(gap, -of.low, of.high)
            loose = sign * gap <= sign * kept
            held.append((gap if loose else kept) if sign else 0.0)
            free.append(bool(sign) and (loose or gap == kept) and abs(token.gap) <= 80)
            outside = gap != kept
            clip[i][t], lower[i][t] = float(outside and sign > 0), float(outside and sign < 0)
            divergence[i][t] = -gap
        count = max(len(tokens), 1)
        weight = math.exp(math.fsum(math.log(token.weight) for _, token in tokens) / count)
        term = -(tokens[0][1].of_sequence[1] if tokens else 0.0) * math.exp(math.fsum(held) / count) * weight
        for (t, _), moves in zip(tokens, free, strict=True):
            value[i][t] = term
            slope[i][t] = math.fsum(weights[i]) * term / count if moves else 0.0
    metrics = {
        "actor/pg_clipfrac": mean(clip, mask),
        "actor/pg_clipfrac_lower": mean(lower, mask),
        "actor/ppo_kl": mean(divergence, mask),
    }
    return {"loss": total(value, weights), "grad_log_prob": slope, "metrics": metrics}
