"""Judging one case: passed, differs on purpose (a rule with a reason), failed, or lacks an optional package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from tandem.base.errors import TandemError
from tests.oracle.oracle_file import Case

RTOL, ATOL = 1e-5, 1e-6


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


@dataclass(frozen=True)
class Answer:
    """What our function returned, by the reference's names; ``expected`` replaces the case's values where only a part
    of them is to be compared."""

    actual: Mapping[str, Any]
    expected: Mapping[str, Any] | None = None


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
    """A kind of case where the reference is wrong. ``holds`` gets what our function did (an ``Answer`` or the error
    that it raised) and says whether that is right."""

    section: str
    reason: str
    applies: Callable[[Case], bool]
    holds: Callable[[Case, Answer | TandemError], bool]
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
    if isinstance(expected, list) and any(isinstance(x, str | list) for x in expected):
        return None if actual == expected else f"{where}: expected {expected!r}, got {actual!r}"
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


def judge(case: Case) -> Verdict:
    """Run the case and compare."""
    if (case.section, case.fn) not in ADAPTERS:
        return Verdict(Kind.FAILED, f"nothing of ours answers {case.section}.{case.fn}: write an adapter for it")
    if case.random:
        return Verdict(Kind.DIFFERS, "depends on the reference's global random state; ours is seeded by the caller")
    outcome: Answer | TandemError
    try:
        outcome = ADAPTERS[case.section, case.fn](case)
    except NotBuiltError as missing:
        return Verdict(Kind.FAILED, f"there is no {missing}")
    except ImportError as missing:
        return Verdict(Kind.NOT_INSTALLED, str(missing))
    except TandemError as refusal:
        outcome = refusal
    if isinstance(outcome, TandemError):
        wrong = None if case.refused else f"we refuse: {outcome}"
    elif case.refused:
        wrong = f"the reference refuses ({case.expected['message']}), we return {outcome.actual!r}"
    else:
        wrong = mismatch(outcome.actual, outcome.expected or case.expected, case.fn)
    if wrong is None:
        return Verdict(Kind.PASSED)
    for difference in DIFFERENCES:
        if difference.covers(case) and difference.holds(case, outcome):
            return Verdict(Kind.DIFFERS, difference.reason)
    return Verdict(Kind.FAILED, wrong)
