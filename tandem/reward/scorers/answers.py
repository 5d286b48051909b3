"""Finding the answer in a text and comparing it with the reference: numbers (GSM8K) and mathematics (math-verify)."""

from __future__ import annotations

import functools
import logging
import re
from decimal import Decimal
from typing import Any, Literal

from tandem.base.errors import DataError
from tandem.reward.scorers.final_answer import outer_boxes
from tandem.reward.scorers.spelling import EMPHASIS, MINUS, PLUS, WIDE, plain_signs, spelled_out

# A comma joins digits only as a thousands separator: groups of exactly three digits behind one to three. The group is
# atomic, so that a longer reading is never given up for a shorter one, and its length bounded, so that no text takes
# quadratic time. A sign behind a letter, a digit or a bracket is an operation, and a dash there one or a range.
_NUMBER = re.compile(
    rf"[$€£]?(?P<sign>(?<![^\W_])(?<![)\]])[{MINUS}{PLUS}])?[$€£]?"
    r"(?P<digits>(?>(?:[0-9]{1,3}(?:,[0-9]{3}){1,20}(?!,?[0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+))"
    rf"(?:(?:[eE]|[ ]?(?:\\times|\\cdot|[×*x])[ ]?10\^\{{?)(?P<power>[{MINUS}{PLUS}]?[0-9]{{1,3}})(?![0-9A-Za-z]))?"
)
_LATEX_SEPARATOR = re.compile(r"\{,\}|,\\!|\\,|\\!(?=[0-9]{3})")
_IN_LIST = rf"[{MINUS}{PLUS}0-9.,\s]*"
_LIST = re.compile(rf"(?<!\\)\[[^\[\]]*\]|[({{]{_IN_LIST}[)}}]|\\\{{{_IN_LIST}\\\}}")
_AROUND = rf"\\(?:boxed|fbox|text(?:bf|it|rm)?|math(?:bf|rm|it))\s*\{{|\\\(|</?[a-z]{{1,6}}>|[{EMPHASIS}$\"'“”‘’ \t]"
_MARKER = re.compile(rf"####[ \t]+(?:{_AROUND})*(?=[{MINUS}{PLUS}$€£.0-9])")
_NOT_ALONE = re.compile(r"[,/][0-9]")  # a list or a fraction goes on behind the number


def extract_numbers(text: str) -> list[Decimal]:
    """Return all numbers of the text in order, each exact.

    ``8,000``, ``8{,}000`` and ``$8,000.`` are 8000; a comma that separates no thousands separates numbers. Inside
    square brackets every comma does, and inside round or curly ones with nothing but numbers in them:
    ``[8.124,12.852]``, ``(100,200)`` and ``{100,200}`` are two. ``4e3`` and ``4 × 10^3`` are 4000. Digits are ASCII or
    wide (``４２``), and another letter ends a number. Any dash is a minus where it is a sign: behind a letter, a digit
    or a bracket (``5-3``, ``2–3``) it is none.
    """
    return [_value(match) for match in _NUMBER.finditer(_plain(text))]


def _plain(text: str) -> str:
    text = _LATEX_SEPARATOR.sub(",", text.translate(WIDE).replace("\\$", "$"))
    return _LIST.sub(lambda found: found[0].replace(",", ", "), text)


def _value(match: re.Match[str]) -> Decimal:
    value = Decimal(f"{match['digits'].replace(',', '')}e{plain_signs(match['power'] or '0')}")
    return value.copy_negate() if match["sign"] and match["sign"] in MINUS else value


def _marked_number(text: str) -> Decimal | None:
    """Return the number behind the last ``####`` that is followed by a single one."""
    text = _plain(text)
    for marker in reversed(list(_MARKER.finditer(text))):
        match = _NUMBER.match(text, marker.end())
        if match is not None and _NOT_ALONE.match(text, match.end()) is None:
            return _value(match)
    return None


def score_gsm8k(
    response: str,
    ground_truth: object,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> float:
    """Return 1.0 if the answer is the number of ``ground_truth`` (by value: ``18.00`` is 18), else 0.0.

    An answer that is read and wrong gets ``format_score``.

    ``strict`` reads the number behind the last ``#### `` of the whole text that a single number follows, whatever comes
    after it; it may be bold or boxed. ``flexible`` reads the last number of the whole text. ``ground_truth`` is a
    number, text that ends with one, or a whole GSM8K solution; raises ``DataError`` if it has none.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method = {method!r}: write strict or flexible")
    reference = str(ground_truth)
    expected = _marked_number(reference) if "####" in reference else _last_number(reference)
    if expected is None:
        raise DataError(f"ground_truth {reference[:80]!r} has no number: gsm8k compares numbers")
    answer = _marked_number(response) if method == "strict" else _last_number(response)
    if answer is None:
        return 0.0
    return 1.0 if answer == expected else format_score


def _last_number(text: str) -> Decimal | None:
    numbers = extract_numbers(text)
    return numbers[-1] if numbers else None


def score_math(response: str, ground_truth: object) -> float:
    r"""Return 1.0 if the answer equals ``ground_truth`` as mathematics, judged by the math-verify package, else 0.0.

    Where the response has several boxes the last ``\boxed`` is the answer; all of them together also are one, for a
    reference that is a set. Signs, emphasis and LaTeX's short forms are spelt out before, which the package doesn't.
    Works in any thread: the package's own time limits (SIGALRM) are off, since whoever runs a scorer gives it a
    deadline. Raises ``DataError`` if ``ground_truth`` has no mathematics in it, ``ImportError`` without the package.
    """
    gold = parse_reference(str(ground_truth))
    package = math_package()
    response = spelt_for_math(response)
    last_box = response.rfind("\\boxed")
    candidates = [response] if response.find("\\boxed") == last_box else [response[last_box:], response]
    return float(
        any(
            package.verify(gold, package.parse(text, parsing_timeout=None), timeout_seconds=None) for text in candidates
        )
    )


def spelt_for_math(text: str) -> str:
    r"""Return a response as math-verify reads it best: in a box any dash is a minus and emphasis is off; ``\fbox`` is
    one.
    """
    text = text.replace("\\fbox", "\\boxed")
    pieces, at = [], 0
    for start, end in outer_boxes(text):
        pieces += [plain_signs(text[at:start], prose=True), plain_signs(text[start:end]).strip(f" {EMPHASIS}")]
        at = end
    return spelled_out("".join([*pieces, plain_signs(text[at:], prose=True)]))


@functools.lru_cache(maxsize=1024)
def parse_reference(ground_truth: str) -> list[Any]:
    """Return what math-verify reads in a ground truth, once for all samples of a group. Raises ``DataError`` if
    nothing.
    """
    package = math_package()
    bare = "\\boxed" not in ground_truth and "$" not in ground_truth
    answer = spelled_out(plain_signs(ground_truth).strip(f" {EMPHASIS}")) if bare else spelt_for_math(ground_truth)
    text = f"${answer}$" if bare else answer
    gold: list[Any] = package.parse(text, parsing_timeout=None)
    if not gold:
        raise DataError(f"ground_truth {ground_truth[:80]!r} has no mathematics that math-verify can read")
    return gold


@functools.cache
def math_package() -> Any:
    """Return the package math-verify. Raises ``ImportError`` with what to install."""
    try:
        import math_verify  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("the reward 'math' needs the package math-verify: pip install math-verify") from error
    for name in ("math_verify.parser", "math_verify.grader"):  # they warn that their time limits are off, as they are
        logging.getLogger(name).addFilter(lambda record: "Timeout is disabled" not in record.getMessage())
    return math_verify
