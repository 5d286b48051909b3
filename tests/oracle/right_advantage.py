"""Advantages from their definitions: plain loops over float64 numbers, nothing of Tandem's.

A sample counts if it has a trained token; it is compared if another sample of its group counts, too. Whoever is not
compared gets 0. All results are lists over the trained tokens, row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from tests.oracle.oracle_file import Case
from tests.oracle.oracle_verdict import REFUSED, Right

Rows = list[list[float]]
"""Per sample one number for each of its trained tokens, in order."""


class Samples:
    """The samples of a case, of which only trained tokens are looked at."""

    def __init__(self, case: Case) -> None:
        given = case.inputs
        self.mask: list[list[bool]] = case.mask().tolist()
        self.places = [[t for t, trained in enumerate(row) if trained] for row in self.mask]
        self.rewards = self.chosen(given["token_level_rewards"])
        self.scores = [math.fsum(row) for row in self.rewards]
        self.lengths = [len(row) for row in self.places]
        owners = given["index"] if "index" in given else list(range(len(self.mask)))
        self.groups: dict[Any, list[int]] = {}
        for row, owner in enumerate(owners):
            if self.lengths[row]:
                self.groups.setdefault(owner, []).append(row)
        self.compared = [group for group in self.groups.values() if len(group) > 1]

    def chosen(self, column: Any) -> Rows:
        """The entries of a (B, T) tensor on trained tokens."""
        values = column.tolist()
        return [[values[row][t] for t in places] for row, places in enumerate(self.places)]

    def spread(self, per_sample: list[float]) -> Rows:
        """A number per sample on each of its tokens."""
        return [[value] * length for value, length in zip(per_sample, self.lengths, strict=True)]

    def to_go(self, discount: float = 1.0) -> Rows:
        """Discounted sums of the rewards from each token on."""
        sums = []
        for row in self.rewards:
            running, back = 0.0, []
            for reward in reversed(row):
                running = reward + discount * running
                back.append(running)
            sums.append(back[::-1])
        return sums

    def centred(self, scores: list[float]) -> list[float]:
        """Scores minus the mean of their group; 0 where nothing is compared."""
        out = [0.0] * len(scores)
        for group in self.compared:
            mean = math.fsum(scores[i] for i in group) / len(group)
            for i in group:
                out[i] = scores[i] - mean
        return out

    def normalised(self, scores: list[float], epsilon: float = 1e-6) -> list[float]:
        """Centred, divided by the unbiased standard deviation of the group plus epsilon."""
        out = self.centred(scores)
        for group in self.compared:
            std = math.sqrt(math.fsum(out[i] ** 2 for i in group) / (len(group) - 1))
            for i in group:
                out[i] /= std + epsilon
        return out


def flat(rows: Iterable[Iterable[float]]) -> list[float]:
    """One list of all."""
    return [value for row in rows for value in row]


class TooFewError(Exception):
    """One trained token in all: its variance is undefined."""


def whitened(rows: Rows, counts: Callable[[int], bool] = lambda row: True) -> Rows:
    """Shifted to mean 0 and scaled to variance 1 over the tokens of the rows that count; 0 in the others."""
    chosen = flat(row for i, row in enumerate(rows) if counts(i))
    if len(chosen) < 2:
        if len(chosen) == len(flat(rows)) == 1:
            raise TooFewError
        return [[0.0] * len(row) for row in rows]
    mean = math.fsum(chosen) / len(chosen)
    variance = math.fsum((value - mean) ** 2 for value in chosen) / (len(chosen) - 1)
    scale = 1 / math.sqrt(variance + 1e-8)
    return [[(value - mean) * scale if counts(i) else 0.0 for value in row] for i, row in enumerate(rows)]


def grpo(samples: Samples, case: Case) -> Rows:
    by_std = case.inputs.get("norm_adv_by_std_in_grpo", True)
    return samples.spread((samples.normalised if by_std else samples.centred)(samples.scores))


def rloo(samples: Samples, case: Case) -> Rows:
    out = [0.0] * len(samples.scores)
    for group in samples.compared:
        for i in group:
            out[i] = samples.scores[i] - math.fsum(samples.scores[j] for j in group if j != i) / (len(group) - 1)
    return samples.spread(out)


def grpo_passk(samples: Samples, case: Case) -> Rows:
    out = [0.0] * len(samples.scores)
    deviations = samples.centred(samples.scores)
    for group in samples.compared:
        second, best = sorted(samples.scores[i] for i in group)[-2:]
        std = math.sqrt(math.fsum(deviations[i] ** 2 for i in group) / (len(group) - 1))
        winner = max(group, key=samples.scores.__getitem__)
        out[winner] = (best - second) / (std + 1e-6 if case.inputs.get("norm_adv_by_std_in_grpo", True) else 1.0)
    return samples.spread(out)


def opo(samples: Samples, case: Case) -> Rows:
    out = [0.0] * len(samples.scores)
    for group in samples.compared:
        tokens = sum(samples.lengths[i] for i in group)
        baseline = math.fsum(samples.scores[i] * samples.lengths[i] for i in group) / tokens
        for i in group:
            out[i] = samples.scores[i] - baseline
    return samples.spread(out)


def gpg(samples: Samples, case: Case) -> Rows:
    counting = [i for group in samples.groups.values() for i in group]
    informative = sum(samples.scores[i] != 0 for i in counting)
    factor = len(counting) / max(informative, 1) / case.inputs.get("f_norm", 1.0)
    return samples.spread([value * factor for value in samples.centred(samples.scores)])


def of_groups(samples: Samples, per_sample: list[float]) -> Rows:
    """Whitened over the tokens of the samples that are compared."""
    compared = {i for group in samples.compared for i in group}
    return whitened(samples.spread(per_sample), compared.__contains__)


def reinforce_plus_plus_baseline(samples: Samples, case: Case) -> Rows:
    return of_groups(samples, samples.centred(samples.scores))


def gdpo(samples: Samples, case: Case) -> Rows:
    weights = case.inputs["weights"] or [1.0, 1.0]
    total = [0.0] * len(samples.scores)
    for name, weight in zip(("reward_a", "reward_b"), weights, strict=True):
        part = samples.normalised([float(value) for value in case.inputs[name]])
        total = [old + weight * new for old, new in zip(total, part, strict=True)]
    return of_groups(samples, total)


def reinforce_plus_plus(samples: Samples, case: Case) -> Rows:
    return whitened(samples.to_go(case.inputs["gamma"]))


def temporal_differences(samples: Samples, case: Case) -> Rows:
    """GAE before it is whitened."""
    gamma, lam = case.inputs["gamma"], case.inputs["lam"]
    out = []
    for rewards, values in zip(samples.rewards, samples.chosen(case.inputs["values"]), strict=True):
        following, back = 0.0, []
        for t in reversed(range(len(rewards))):
            coming = values[t + 1] if t + 1 < len(rewards) else 0.0
            following = rewards[t] + gamma * coming - values[t] + gamma * lam * following
            back.append(following)
        out.append(back[::-1])
    return out


def remax(samples: Samples, case: Case) -> Rows:
    greedy = case.inputs["reward_baselines"].tolist()
    return [[g - greedy[i] for g in row] for i, row in enumerate(samples.to_go())]


def has_flat_group(case: Case) -> bool:
    """Whether the samples of some group all have the same score."""
    samples = Samples(case)
    return any(len({samples.scores[i] for i in group}) == 1 for group in samples.compared)


def token_baseline(samples: Samples, case: Case) -> Rows:
    """Per place the mean of the returns weighted by energy; places are positions, or ranks of trained tokens."""
    given, returns = case.inputs, samples.to_go()
    old, squares = samples.chosen(given["old_log_probs"]), samples.chosen(given["sum_pi_squared"])
    weights = samples.chosen(given["rollout_is_weights"]) if "rollout_is_weights" in given else None
    places = [list(range(n)) for n in samples.lengths] if case.fn.startswith("tir") else samples.places
    energy: Rows = []
    for i, row in enumerate(old):
        running, sums = 0.0, []
        for t, logprob in enumerate(row):
            of_token = 1 - 2 * math.exp(logprob) + squares[i][t]
            running += max(of_token * (weights[i][t] ** 2 if weights else 1.0), 0.0)
            sums.append(running)
        energy.append(sums)
    out = [[0.0] * n for n in samples.lengths]
    for group in samples.compared:
        reached: dict[int, list[tuple[int, int]]] = {}
        for i in group:
            for t, place in enumerate(places[i]):
                reached.setdefault(place, []).append((i, t))
        shared = [tokens for tokens in reached.values() if len(tokens) > 1]
        if not any(returns[i][t] != returns[tokens[0][0]][tokens[0][1]] for tokens in shared for i, t in tokens):
            continue  # flat: nothing tells the samples apart
        for tokens in reached.values():
            total = math.fsum(energy[i][t] for i, t in tokens)
            parts = [energy[i][t] / total if total > 0 else 1 / len(tokens) for i, t in tokens]
            baseline = math.fsum(returns[i][t] * part for (i, t), part in zip(tokens, parts, strict=True))
            for i, t in tokens:
                out[i][t] = returns[i][t] - (baseline if len(tokens) > 1 else 0.0)
    return out


DEFINITIONS: dict[str, Callable[[Samples, Case], Rows]] = {
    "grpo": grpo,
    "grpo_vectorized": grpo,
    "rloo": rloo,
    "rloo_vectorized": rloo,
    "grpo_passk": grpo_passk,
    "opo": opo,
    "gpg": gpg,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gdpo": gdpo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "remax": remax,
    "optimal_token_baseline": token_baseline,
    "tir_optimal_token_baseline": token_baseline,
}


def right_advantages(case: Case) -> Right:
    """Advantages and returns over the trained tokens."""
    samples = Samples(case)
    try:
        if case.fn == "gae":
            steps = temporal_differences(samples, case)
            values = samples.chosen(case.inputs["values"])
            returns = [[a + v for a, v in zip(*pair, strict=True)] for pair in zip(steps, values, strict=True)]
            return {"advantages": flat(whitened(steps)), "returns": flat(returns)}
        advantages = flat(DEFINITIONS[case.fn](samples, case))
    except TooFewError:
        return REFUSED
    if case.fn in ("reinforce_plus_plus", "remax") or "token_baseline" in case.fn:
        discount = case.inputs["gamma"] if case.fn == "reinforce_plus_plus" else 1.0
        return {"advantages": advantages, "returns": flat(samples.to_go(discount))}
    return {"advantages": advantages, "returns": advantages}
