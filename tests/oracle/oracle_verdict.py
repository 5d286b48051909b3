"""Judging one case: passed, differs on purpose (a rule with the right value), failed, or lacks an optional package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import torch

from tandem.base.errors import TandemError
from tests.oracle.oracle_file import Case

RTOL, ATOL = 1e-5, 1e-6
OPTIONAL_PACKAGES = frozenset({"math_verify", "reasoning_gym"})


class Kind(StrEnum):
    """What became of a case."""

    PASSED = "passed"
    DIFFERS = "differs on purpose"
    NOT_INSTALLED = "not installed"
    FAILED = "failed"


@dataclass(frozen=True)
class Verdict:
    """``reason`` says why it differs, what is missing, or what was wrong."""

    kind: Kind
    reason: str = ""


class NotBuiltError(Exception):
    """The function that a case asks for does not exist yet."""


class Refused:
    """The right answer is an error, not a number."""


REFUSED = Refused()
Right: TypeAlias = "Mapping[str, Any] | Refused"
"""What is right, by the reference's names; what is not named is as the reference says."""


@dataclass(frozen=True)
class Answer:
    """What our function returned, by the reference's names; ``expected`` replaces the case's values where ours come in
    another form, or where only a part of them is ours to give."""

    actual: Mapping[str, Any]
    expected: Mapping[str, Any] | None = None


Outcome: TypeAlias = "Answer | TandemError"
"""What our function did."""

Adapter = Callable[[Case], Answer]
ADAPTERS: dict[tuple[str, str], Adapter] = {}


def adapter(section: str, *names: str) -> Callable[[Adapter], Adapter]:
    """Register the function that runs the cases ``section.name``."""

    def add(function: Adapter) -> Adapter:
        for name in names:
            ADAPTERS[section, name] = function
        return function

    return add


@dataclass(frozen=True)
class Difference:
    """A kind of case where the reference is wrong or another choice was made. ``right`` computes what is right by
    itself, from the definition, with nothing of Tandem's: what we did must be that, and not merely something else."""

    section: str
    reason: str
    applies: Callable[[Case], bool]
    right: Callable[[Case], Right]
    names: frozenset[str] = field(default_factory=frozenset)

    def covers(self, case: Case) -> bool:
        """Whether the case is of this kind."""
        return case.section == self.section and (not self.names or case.fn in self.names) and self.applies(case)


DIFFERENCES: list[Difference] = []


def mismatch(actual: Any, expected: Any, where: str) -> str | None:
    """Where two values differ beyond the tolerance; None if nowhere. Numbers of any kind compare by value."""
    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping) or set(expected) - set(actual):
            return f"{where}: keys {sorted(expected)}, got {actual!r}"
        found = (mismatch(actual[key], expected[key], f"{where}.{key}") for key in expected)
        return next((text for text in found if text), None)
    if expected is None or isinstance(expected, str):
        return None if actual == expected else f"{where}: expected {expected!r}, got {actual!r}"
    if isinstance(expected, list) and any(isinstance(x, str | list | Mapping) or x is None for x in expected):
        if not isinstance(actual, torch.Tensor | list | tuple) or len(actual) != len(expected):
            return f"{where}: expected {expected!r}, got {actual!r}"
        pairs = enumerate(zip(actual, expected, strict=True))
        return next((text for i, pair in pairs if (text := mismatch(*pair, f"{where}[{i}]"))), None)
    if not isinstance(actual, torch.Tensor | list | tuple | bool | int | float):
        return f"{where}: expected numbers, got {actual!r}"
    want, got = torch.as_tensor(expected).double(), torch.as_tensor(actual).double()
    if want.numel() == 1 and got.numel() == 1:
        want, got = want.reshape(()), got.reshape(())
    if want.shape != got.shape:
        return f"{where}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}"
    if torch.allclose(got, want, rtol=RTOL, atol=ATOL, equal_nan=True):
        return None
    worst = (got - want).abs().nan_to_num(nan=float("inf")).max()
    return f"{where}: off by {float(worst):.3g}\nexpected {want.tolist()}\ngot      {got.tolist()}"


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of both, those of ``above`` before the others, also inside entries that are mappings themselves."""
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(inner, Mapping)
        merged[key] = overlaid(inner, value) if both else value  # type: ignore[arg-type]
    return merged


def restricted(values: Mapping[str, Any], to: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of ``values`` that ``to`` has, too, also inside entries that are mappings in both."""
    kept = {}
    for key in values.keys() & to.keys():
        value, other = values[key], to[key]
        both = isinstance(value, Mapping) and isinstance(other, Mapping)
        kept[key] = restricted(value, other) if both else value
    return kept


def judge(case: Case) -> Verdict:
    """Run the case and compare. Whatever goes wrong on the way is a failure, and never no verdict."""
    if (case.section, case.fn) not in ADAPTERS:
        return Verdict(Kind.FAILED, f"nothing of ours answers {case.section}.{case.fn}: write an adapter for it")
    case.inputs.forget()
    outcome: Outcome
    try:
        outcome = ADAPTERS[case.section, case.fn](case)
        if unread := case.inputs.unread():
            return Verdict(Kind.FAILED, f"nothing of ours reads {', '.join(sorted(unread))}: it would have no effect")
    except TandemError as refusal:
        outcome = refusal
    except NotBuiltError as missing:
        return Verdict(Kind.FAILED, f"there is no {missing}")
    except ModuleNotFoundError as missing:
        if missing.name not in OPTIONAL_PACKAGES:
            return Verdict(Kind.FAILED, f"the adapter raised {missing!r}")
        return Verdict(Kind.NOT_INSTALLED, str(missing))
    except Exception as error:
        return Verdict(Kind.FAILED, f"the adapter raised {error!r}")
    return judge_outcome(case, outcome)


def judge_outcome(case: Case, outcome: Outcome) -> Verdict:
    """Compare with the reference and, where a rule covers the case, with what that rule computes.

    Where the two differ the rule is right: to agree with a reference that is wrong is a failure, too.
    """
    try:
        rules = [difference for difference in DIFFERENCES if difference.covers(case)]
        rights = [rule.right(case) for rule in rules]
    except Exception as error:
        return Verdict(Kind.FAILED, f"a rule raised {error!r}")
    against = None if case.random else against_reference(case, outcome)
    if not rules:
        if case.random:
            return Verdict(Kind.FAILED, "it depends on the reference's random state, and no rule says what is right")
        return Verdict(Kind.FAILED, against) if against else Verdict(Kind.PASSED)
    wrong = against_rules(case, outcome, rights)
    if wrong:
        return Verdict(Kind.FAILED, f"{rules[0].reason}: {wrong}")
    return Verdict(Kind.DIFFERS, rules[0].reason) if against or case.random else Verdict(Kind.PASSED)


def against_reference(case: Case, outcome: Outcome) -> str | None:
    """How what we did differs from what the reference did."""
    if isinstance(outcome, TandemError):
        return None if case.refused else f"we refuse: {outcome}"
    if case.refused:
        return f"the reference refuses ({case.expected['message']}), we return {outcome.actual!r}"
    return mismatch(outcome.actual, outcome.expected or case.expected, case.fn)


def against_rules(case: Case, outcome: Outcome, rights: list[Right]) -> str | None:
    """How what we did differs from what the rules say, and where they say nothing, from the reference."""
    values = [right for right in rights if not isinstance(right, Refused)]
    if isinstance(outcome, TandemError):
        return f"we refuse: {outcome}" if values else None
    if len(values) < len(rights):
        return f"it is to be refused, and we return {outcome.actual!r}"
    wanted: dict[str, Any] = {} if case.refused else dict(outcome.expected or case.expected)
    for right in values:
        wanted = overlaid(wanted, restricted(right, outcome.actual))
    if unsaid := set(outcome.actual) - set(wanted):
        return f"nothing says what is right for {sorted(unsaid)}"
    return mismatch(outcome.actual, wanted, case.fn)
