r"""Where a text says its answer, and the answer in one plain spelling: boxes, answer lines, LaTeX, units."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction

from tandem.reward.scorers.spelling import EMPHASIS, plain_signs, spelled_out

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$]+)")
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]*)", re.IGNORECASE)
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_INVISIBLE = re.compile(r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\[,;!: ]|~|\\(?:quad|qquad)(?![a-zA-Z])")
_SCRIPT = re.compile(r"([\^_])\s*([0-9a-zA-Z])")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree|°")
_NUMBER = r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?"
_PLAIN_NUMBER = re.compile(_NUMBER)
_FRACTION = re.compile(r"([-+]?)(?:\\frac\{([-+]?[0-9]{1,50})\}\{([-+]?[0-9]{1,50})\}|([0-9]{1,50})/([0-9]{1,50}))")
_UNITS = (
    r"\\?%|dollars?|cents?|euros?|"
    "degrees?|percent|points?|units?|square|cubic|inch(?:es)?|feet|foot|ft|yards?|miles?|mph|"
    "metres?|meters?|centimeters?|kilometers?|[ckm]?m|kg|g|grams?|kilograms?|pounds?|lbs?|ounces?|lit(?:er|re)s?|"
    "seconds?|minutes?|hours?|days?|weeks?|months?|years?|people|students|apples|ways|integers|digits|edges|multiples"
)
_MEASURED = re.compile(rf"({_NUMBER})\s*(?:{_UNITS})(?:\s+(?:{_UNITS}))*\.?", re.IGNORECASE)

_AROUND = f" \t\r\n\"'“”‘’{EMPHASIS}"


def last_box(text: str) -> str | None:
    r"""Return what the last complete ``\boxed{...}`` or ``\fbox{...}`` holds, braces in it balanced; ``\boxed 7`` is
    one too.

    A box inside a box belongs to the outer one. None where there is no complete box.
    """
    boxes = outer_boxes(text)
    last = boxes[-1] if boxes else None
    bare = _BARE_BOX.findall(text, last[1] if last else 0)
    if bare:
        return str(bare[-1])
    return None if last is None else text[last[0] : last[1]]


def outer_boxes(text: str) -> list[tuple[int, int]]:
    """Return where the content of each closed box that lies in no other begins and ends, in order."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(_boxes(text)):
        if not found or start > found[-1][1]:
            found.append((start, end))
    return found


def _boxes(text: str) -> Iterator[tuple[int, int]]:
    """Yield where the content of each closed box begins and ends, inner ones first. One pass."""
    opened: list[int | None] = []
    for found in _BRACES.finditer(text):
        token = found[0]
        if token.endswith("{") and len(token) != 2:
            opened.append(found.end() if len(token) > 1 else None)
        elif token == "}" and opened and (start := opened.pop()) is not None:
            yield start, found.start()


def last_answer_line(text: str) -> str | None:
    """Return what follows the last ``Answer:`` that anything follows on its line, or on the next; None if there is
    none.
    """
    found = [line for match in _ANSWER_LINE.finditer(text) if (line := match[1].strip())]
    return found[-1] if found else None


def plain(answer: str) -> str:
    r"""Return the answer without what doesn't change its value: ``$x = \dfrac12$.`` is ``\frac{1}{2}``.

    Taken off are a box, dollar signs, ``x =`` and the like in front, LaTeX's fonts, spaces and size commands, a unit
    behind a number, a full stop at the end, blanks, and the commas of thousands.
    """
    for _ in range(4):  # boxes in boxes, text in text
        boxed = last_box(answer)
        answer = _WRAPPER.sub(r"\1", answer if boxed is None else boxed)
    answer = answer.replace("\\$", "").replace("{,}", ",").replace(",\\!", ",").replace("$", "")
    answer = spelled_out(_INVISIBLE.sub(" ", plain_signs(answer)))
    answer = _DEGREES.sub("", answer).strip(_AROUND)
    if answer.endswith(".") and not answer.endswith(".."):
        answer = answer.rstrip(_AROUND + ".")
    before, equals, after = answer.rpartition("=")
    if equals and after.strip() and before[-1:] not in ("<", ">", "!"):
        answer = after.strip()
    measured = _MEASURED.fullmatch(answer)
    answer = "".join((measured[1] if measured else answer).split())
    return answer.replace(",", "") if _PLAIN_NUMBER.fullmatch(answer) else answer


def same_answer(answer: str, expected: str) -> bool:
    """Return whether two answers are equal as plain text, or as numbers: ``12.0`` is ``12``, ``-\\frac12`` is ``-1/2``.

    A plus in front, braces around one character (``x^{2}``) and the place of a fraction's sign make no difference; a
    fraction that can be reduced does.
    """
    answer, expected = plain(answer), plain(expected)
    if _uniform(answer) == _uniform(expected):
        return True
    fractions = as_fraction(answer), as_fraction(expected)
    if None not in fractions:
        return fractions[0] == fractions[1]
    numbers = _number(answer), _number(expected)
    return None not in numbers and numbers[0] == numbers[1]


def _uniform(answer: str) -> str:
    return _SCRIPT.sub(r"\1{\2}", answer.removeprefix("+"))


def as_fraction(answer: str) -> tuple[Fraction, bool] | None:
    r"""Return the value of ``\frac{a}{b}`` or ``a/b`` of whole numbers, and whether it is in lowest terms; else
    None.
    """
    found = _FRACTION.fullmatch(plain(answer))
    if found is None:
        return None
    top, bottom = int(found[2] or found[4]), int(found[3] or found[5])
    if bottom == 0:
        return None
    value = Fraction(top, bottom)
    return (-value if found[1] == "-" else value), abs(bottom) == value.denominator


def _number(text: str) -> Decimal | None:
    whole = _PLAIN_NUMBER.fullmatch(text) is not None and any(c.isdigit() for c in text)
    return Decimal(text) if whole else None
