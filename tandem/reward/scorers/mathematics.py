r"""Scorers of mathematics in LaTeX: by math-verify, by the answer line of DAPO, and by value with a tolerance."""

from __future__ import annotations

import re
from typing import Any

from tandem.base.errors import DataError
from tandem.reward.ranges import BelowRight, InnerFraction
from tandem.reward.registry import register_reward
from tandem.reward.scorers.answers import extract_numbers, math_package, parse_reference, score_math, spelt_for_math
from tandem.reward.scorers.final_answer import as_fraction, last_answer_line, last_box, plain, same_answer
from tandem.reward.scorers.spelling import plain_signs, spelled_out

_SAID = re.compile(r"answer\s+is\s*:?\s*([^\n]+)", re.IGNORECASE)
_CLAUSE = re.compile(r"[.;](?:\s|$)")


@register_reward("math", packages=("math_verify",))
def math(response: str, ground_truth: object) -> float:
    """Return 1 if the answer equals the ground truth as mathematics (package math-verify), else 0."""
    return score_math(response, ground_truth)


@register_reward("math_dapo")
def math_dapo(
    response: str, ground_truth: object, *, strict_box: bool = False, wrong: BelowRight = -1.0
) -> dict[str, float]:
    r"""Return 1 if what follows the last ``Answer:`` is the ground truth, else ``wrong``; the metric ``acc`` is 1 or 0.

    The rule of DAPO (arXiv:2503.14476). A box on the answer line is the answer, and without such a line the last
    ``\boxed{}`` of the response; with ``strict_box`` always that. Answers are equal as plain text (units, LaTeX's
    spacing, short forms and fonts aside) or as numbers.
    """
    answer = dapo_answer(response, strict_box=strict_box)
    right = answer is not None and same_answer(answer, _needed(ground_truth))
    return {"score": 1.0 if right else wrong, "acc": float(right)}


def dapo_answer(response: str, *, strict_box: bool = False) -> str | None:
    """Return the answer that ``math_dapo`` compares, in its plain spelling; None if the response gives none."""
    found = None if strict_box else last_answer_line(response)
    found = last_box(response) if found is None else found
    return None if found is None else plain(found)


@register_reward("prime_math", packages=("math_verify",))
def prime_math(
    response: str, ground_truth: object, *, tolerance: InnerFraction = 1e-4, lowest_terms: bool = True
) -> float:
    r"""Return 1 if the answer has the value of the ground truth within a relative ``tolerance``, else 0; looser than
    ``math``.

    The answer is the last ``\boxed{}``, else what follows the last "answer is" or ``Answer:``, else the last number.
    Pi may be 3.14. ``lowest_terms``: where both are fractions, one that can be reduced is wrong.
    """
    expected = _needed(ground_truth)
    answer = _found_answer(response)
    if answer is None:
        return 0.0
    fractions = as_fraction(answer), as_fraction(expected)
    if lowest_terms and fractions[0] is not None and fractions[1] is not None:
        return float(fractions[0] == fractions[1])
    if same_answer(answer, expected):
        return 1.0
    package = math_package()
    gold = parse_reference(expected)
    spelt = spelt_for_math(answer) if "$" in answer else f"${spelled_out(plain_signs(answer))}$"
    given = package.parse(spelt, parsing_timeout=None)
    if package.verify(gold, given, timeout_seconds=None):
        return 1.0
    return float(bool(gold and given) and _close(given[0], gold[0], tolerance))


def _needed(ground_truth: object) -> str:
    if ground_truth is None or not str(ground_truth).strip():
        raise DataError("the data row has no ground truth: set data.answer_key to its column")
    return str(ground_truth)


def _found_answer(response: str) -> str | None:
    boxed = last_box(response)
    if boxed is not None:
        return boxed
    said = [match[1] for match in _SAID.finditer(response)]
    line = said[-1] if said else last_answer_line(response)
    if line is not None:
        return _CLAUSE.split(line, maxsplit=1)[0]
    numbers = extract_numbers(response)
    return str(numbers[-1]) if numbers else None


def _close(given: Any, gold: Any, tolerance: float) -> bool:
    """Return whether two SymPy expressions have nearly the same value, with pi exact or 3.14."""
    import sympy  # type: ignore[import-untyped]

    for pi in (sympy.pi, sympy.Float("3.14")):
        values = []
        for expression in (given, gold):
            if not isinstance(expression, sympy.Expr) or expression.free_symbols:
                return False
            try:
                values.append(complex(expression.subs(sympy.pi, pi).evalf()))
            except (ArithmeticError, TypeError, ValueError, AttributeError, RecursionError):  # no number comes of it
                return False
        if abs(values[0] - values[1]) <= tolerance * abs(values[1]):
            return True
    return False
