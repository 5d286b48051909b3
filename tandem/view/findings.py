"""What is off in the curves of a run, in words, and the page that says what to do: pure functions of its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from tandem.observe.metrics import Row

WINDOW = 10
"""Steps at each end that are compared."""
FEWEST = 2 * WINDOW
"""Steps before anything is said of a trend."""

SOLVED = 0.95
"""From such a mean reward on there is little left to learn."""

NOT_LEARNING = "docs/not-learning.md"

Curves = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Finding:
    """Something to look at: ``title`` in few words, ``words`` with the numbers, ``key`` of the curve, ``page``."""

    title: str
    words: str
    key: str
    page: str = NOT_LEARNING


Check = Callable[[Curves, Mapping[str, Any]], Iterator[Finding]]


def find(rows: Sequence[Row], config: Mapping[str, Any]) -> list[Finding]:
    """Return all that is off in ``rows`` of a run with this flat ``config``, most telling first."""
    curves: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and row["step"]:
                curves.setdefault(key, []).append(float(value))
    return [finding for check in CHECKS for finding in check(curves, config)]


def failed_scorings(curves: Curves, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Find answers without a reward, which are in no mean."""
    share = curves.get("reward/scored_share", [])
    if share and min(share) < 1:
        words = f"{1 - fmean(share):.1%} of the answers have no reward and count in no mean; the worst step scored "
        yield Finding("Scorings fail", words + f"{min(share):.0%}", "reward/scored_share", "docs/rewards.md")


def no_spread(curves: Curves, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Find groups of equal rewards: they teach nothing under a group baseline."""
    flat, groups = curves.get("reward/groups_without_signal", []), config.get("data.train_batch_size")
    if flat and isinstance(groups, int) and fmean(flat[-WINDOW:]) >= 0.9 * groups:
        newest = flat[-WINDOW:]
        words = f"in the last {len(newest)} steps {fmean(newest):.1f} of {groups} groups had equal rewards"
        yield Finding("Rewards have no spread", words, "reward/groups_without_signal")


def nothing_learned(curves: Curves, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Find a reward that is at the end within the noise of that at the start."""
    reward = curves.get("reward/mean", [])
    if len(reward) >= 2 * FEWEST:
        first, last = reward[:WINDOW], reward[-WINDOW:]
        change, noise = fmean(last) - fmean(first), max(pstdev(first), pstdev(last))
        if change <= noise and fmean(first) < SOLVED:
            words = f"the reward went from {fmean(first):.3f} to {fmean(last):.3f}, within its noise ({noise:.3f})"
            yield Finding("Nothing is learned yet", words, "reward/mean")


def entropy_collapse(curves: Curves, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Find a policy that has lost its entropy: it explores nothing more."""
    entropy = curves.get("entropy/mean", [])
    if len(entropy) >= FEWEST:
        first, last = fmean(entropy[:WINDOW]), fmean(entropy[-WINDOW:])
        if last < 0.2 * first:
            words = f"from {first:.3f} to {last:.3f} nats per token: the answers to a prompt become all alike"
            yield Finding("Entropy collapses", words, "entropy/mean")


def truncation(curves: Curves, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Find answers that are cut: they can't be right."""
    cut = curves.get("length/truncated", [])
    if not cut:
        return
    first, last = fmean(cut[:WINDOW]), fmean(cut[-WINDOW:])
    if len(cut) >= FEWEST and last > first + 0.1:
        yield Finding("More and more answers are cut", f"{first:.0%} at first, {last:.0%} now", "length/truncated")
    elif last > 0.3:
        yield Finding("Many answers are cut", f"{last:.0%} reach data.max_response_length", "length/truncated")


def reward_hacking(curves: Curves, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Find a reward that rises with the length, or in training alone: it may be paid for something else."""
    reward, length = curves.get("reward/mean", []), curves.get("length/mean", [])
    if len(reward) >= FEWEST and len(length) == len(reward):
        together = correlation(reward, length)
        grown = fmean(length[-WINDOW:]) / max(fmean(length[:WINDOW]), 1e-9)
        if together > 0.8 and grown > 1.5:
            words = f"answers are {grown:.1f} times as long as at first, and their reward rose with it "
            yield Finding("Reward follows length", words + f"(correlation {together:.2f})", "length/mean")
    held_out = curves.get("eval/reward", [])
    if len(reward) >= FEWEST and len(held_out) >= 3:
        rise, there = fmean(reward[-WINDOW:]) - fmean(reward[:WINDOW]), held_out[-1] - held_out[0]
        if rise > 0.1 and there < 0.2 * rise:
            words = f"the reward of trained prompts rose by {rise:.3f}, that of held-out ones by {there:.3f}"
            yield Finding("Held-out prompts don't follow", words, "eval/reward")


def mismatch(curves: Curves, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Find an engine and a trainer that come to disagree about the same weights."""
    same = curves.get("mismatch/abs_same", [])  # without what the policy has moved since
    apart = same if len(same) >= FEWEST else curves.get("mismatch/abs", [])
    if len(apart) >= FEWEST:
        first, last = fmean(apart[:WINDOW]), fmean(apart[-WINDOW:])
        if last > 0.02 and last > 2 * first:
            words = f"log-probs of engine and trainer differ by {last:.3f} per token, {first:.3f} at first"
            yield Finding("Engine and trainer drift apart", words, "mismatch/abs")


def skipped_updates(curves: Curves, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Find updates that were left out for their gradient."""
    skipped = curves.get("optim/skipped_steps", [])
    if skipped and skipped[-1] > skipped[0]:
        words = f"{skipped[-1]:.0f} optimizer steps were left out: their gradient was not finite, or zero everywhere"
        yield Finding("Updates are skipped", words, "optim/skipped_steps")


def large_steps(curves: Curves, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Find steps in which many tokens are clipped: the policy moves further than the loss can say."""
    clipped = curves.get("loss/clipfrac", [])[-WINDOW:]
    if clipped and fmean(clipped) > 0.3:
        yield Finding("Steps are large", f"{fmean(clipped):.0%} of the tokens are clipped", "loss/clipfrac")


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return Pearson's correlation; 0 where either stands still."""
    mean_x, mean_y = fmean(xs), fmean(ys)
    spread = pstdev(xs) * pstdev(ys) * len(xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread > 0 else 0.0


CHECKS: tuple[Check, ...] = (
    failed_scorings,
    no_spread,
    nothing_learned,
    entropy_collapse,
    truncation,
    reward_hacking,
    mismatch,
    skipped_updates,
    large_steps,
)
"""In the order in which they are told."""
