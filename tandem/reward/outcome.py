"""What comes out of scoring: a number, or the reason why there is none. Never a silent zero."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from tandem.base.errors import RewardError
from tandem.base.hidden import hide

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest float32, as which rewards are kept."""

LONGEST_NOTE = 20_000
"""Characters of a scorer's text that are kept."""

PROCESS = "the scoring process"
"""Begins the reason where a process ended in a scoring."""


class Sample(NamedTuple):
    """What a scorer of single samples may ask for, by the names of ``registry.SAMPLE_FIELDS``."""

    response: str
    ground_truth: Any = None
    prompt: str = ""
    data_source: str | None = None
    extra_info: Mapping[str, Any] | None = None
    response_length: int = 0  # tokens
    truncated: bool = False
    messages: Sequence[Mapping[str, Any]] | None = None


class Outcome(StrEnum):
    """How the scoring of one sample ended."""

    SCORED = "scored"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True)
class Verdict:
    """The outcome of one sample. ``reward`` is NaN unless scored; ``reason`` is empty if scored.

    ``components`` are the terms that ``reward`` is the sum of, where the scorer has such; none unless scored. ``notes``
    are what the scorer says in words, such as a judge's reply.
    """

    reward: float
    outcome: Outcome = Outcome.SCORED
    reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    components: tuple[float, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)


def failed(reason: str) -> Verdict:
    """Return the verdict of a scoring that gave no number."""
    return Verdict(math.nan, Outcome.FAILED, hide(reason))


def timed_out(seconds: float) -> Verdict:
    """Return the verdict of a scoring that was ended by its deadline."""
    return Verdict(math.nan, Outcome.TIMED_OUT, f"not scored within {seconds:g} s")


def as_verdict(value: object) -> Verdict:
    """Judge what a scorer returned for one sample.

    A number (bool, int, float, a NumPy or torch scalar) that is finite as float32 is scored; so is a dict whose
    ``score`` is one. Of its other entries the finite numbers become metrics and the texts notes, the rest is left out.
    Anything else is a failure.
    """
    metrics: dict[str, float] = {}
    notes: dict[str, str] = {}
    if isinstance(value, Mapping):
        if "score" not in value:
            return failed(f"returned a dict without 'score' (it has {sorted(map(str, value))})")
        others = ((str(key), _number(item)) for key, item in value.items() if key != "score")
        metrics = {key: number for key, number in others if number is not None and math.isfinite(number)}
        notes = {
            str(key): hide(item[:LONGEST_NOTE])
            for key, item in value.items()
            if key != "score" and isinstance(item, str)
        }
        value = value["score"]
    number = _number(value)
    if number is None:
        return failed(
            f"returned {_shown(value)}, not a number" + (" (a wrong answer's is 0.0)" if value is None else "")
        )
    if (reason := unusable(number)) is not None:
        return failed(f"returned {reason}")
    return Verdict(number, metrics=metrics, notes=notes)


def unusable(number: float) -> str | None:
    """Return why a number is no reward; None if it is one."""
    if not math.isfinite(number):
        return f"{number}, not a finite number"
    return f"{number:g}, which is beyond float32" if abs(number) > LARGEST else None


def as_verdicts(values: object, count: int) -> list[Verdict]:
    """Judge what a batch scorer returned: ``count`` numbers in a tensor or array (B,) or a list; each stands alone."""
    rows = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(rows, tuple):
        rows = list(rows)
    if not isinstance(rows, list):
        return [failed(f"returned {_shown(values)}, not {count} numbers")] * count
    if len(rows) != count:
        return [failed(f"returned {len(rows)} rewards for {count} samples")] * count
    return [as_verdict(row) for row in rows]


def _number(value: object) -> float | None:
    if isinstance(value, (str, bytes, bytearray)) or not hasattr(type(value), "__float__"):
        return None if not isinstance(value, int) else float(value)
    try:
        return float(value)  # type: ignore[arg-type]
    except Exception:  # a tensor of many elements, an int beyond float, an object of the user's
        return None


def _shown(value: object) -> str:
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{kind} {value[:40]!r}" if isinstance(value, str) else f"an object of type {kind}"


@dataclass(frozen=True)
class Scores:
    """The verdicts of one submitted group, in its order; every tuple has length B."""

    rewards: tuple[float, ...]  # NaN where there is none
    outcomes: tuple[Outcome, ...]
    reasons: tuple[str, ...]
    metrics: tuple[dict[str, float], ...]
    names: tuple[str, ...]  # of the samples, for messages
    components: tuple[tuple[float, ...], ...]  # K terms of each reward, none where there is no reward
    notes: tuple[dict[str, str], ...]

    @classmethod
    def of(cls, verdicts: Sequence[Verdict], label: str) -> Scores:
        """Return the columns of the verdicts; sample ``i`` is called ``label[i]``."""
        return cls(
            rewards=tuple(v.reward for v in verdicts),
            outcomes=tuple(v.outcome for v in verdicts),
            reasons=tuple(v.reason for v in verdicts),
            metrics=tuple(v.metrics for v in verdicts),
            names=tuple(f"{label}[{i}]" for i in range(len(verdicts))),
            components=tuple(v.components for v in verdicts),
            notes=tuple(v.notes for v in verdicts),
        )

    @classmethod
    def joined(cls, groups: Iterable[Scores]) -> Scores:
        """Return the scores of several groups, one after the other."""
        every = list(groups)
        return cls(*(tuple(item for group in every for item in getattr(group, column.name)) for column in fields(cls)))

    def __len__(self) -> int:
        return len(self.rewards)

    def first(self, count: int) -> Scores:
        """Return the scores of the first ``count`` samples."""
        return Scores(*(getattr(self, column.name)[:count] for column in fields(self)))

    @property
    def valid(self) -> tuple[bool, ...]:
        """True where there is a reward."""
        return tuple(outcome is Outcome.SCORED for outcome in self.outcomes)

    def remarks(self) -> list[dict[str, Any]]:
        """Return what was said of each sample beside its reward: the column ``scoring``."""
        rows = zip(self.reasons, self.metrics, self.notes, strict=True)
        return [{"failure": reason, "metrics": metrics, "notes": notes} for reason, metrics, notes in rows]

    def report(self) -> dict[str, float]:
        """Return the counts of the outcomes (always all three) and the mean of each metric over the samples that have
        it.
        """
        counts = Counter(self.outcomes)
        lines = {str(outcome): float(counts[outcome]) for outcome in Outcome}
        names = sorted({name for metrics in self.metrics for name in metrics})
        for name in names:
            found = [metrics[name] for metrics in self.metrics if name in metrics]
            lines[name] = sum(found) / len(found)
        return lines


def share_scored(report: Mapping[str, float]) -> dict[str, float]:
    """Return ``scored_share`` of the scorings that ``report`` counts; nothing where there was none."""
    total = sum(report.get(str(outcome), 0.0) for outcome in Outcome)
    return {"scored_share": report[str(Outcome.SCORED)] / total} if total else {}


@dataclass(frozen=True)
class Treatment:
    """What to do with a group: ``valid`` samples count in statistics and loss; those in ``refill`` are drawn anew."""

    valid: tuple[bool, ...]
    refill: tuple[int, ...]


def apply_policy(scores: Scores, on_error: Literal["mask", "refill", "stop"]) -> Treatment:
    """Turn outcomes into a treatment.

    ``mask`` leaves a sample without reward out of everything, ``refill`` also names it for another draw, ``stop``
    raises ``RewardError`` with the first such sample, its reason and what to do.
    """
    bad = tuple(i for i, valid in enumerate(scores.valid) if not valid)
    if bad and on_error == "stop":
        i, more = bad[0], f" ({len(bad)} of {len(scores)} samples have none)" if len(bad) > 1 else ""
        remedy = (
            "Raise reward_manager.timeout_s"
            if scores.outcomes[i] is Outcome.TIMED_OUT
            else "Mend the scorer or the data row"
        )
        raise RewardError(
            f"no reward for {scores.names[i]}{more}: {scores.reasons[i]}. {remedy}, or write "
            "reward_manager.on_error: mask (leave such samples out) or refill (draw them anew)"
        )
    return Treatment(scores.valid, bad if on_error == "refill" else ())
