r"""Equality of small pieces of LaTeX by their values: a parser of its own, with neither math-verify nor Tandem.

An expression is a number at each of a few fixed values of its letters; two are equal if those agree. Lists, tuples and
sets are compared by their elements, words as text.
"""

from __future__ import annotations

import cmath
import re
from dataclasses import dataclass

TOKEN = re.compile(r"\s+|\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+|\\[a-zA-Z]+|\\.|.", re.DOTALL)
SPACING = {"\\,", "\\;", "\\:", "\\!", "\\ ", "\\left", "\\right", "\\quad", "\\displaystyle"}
MINUS = "−‐‑‒–—―－"
PLACES = (0.731, 1.917, 2.473)
"""Where letters are looked at; each letter is moved by its own amount."""


class NotAnExpressionError(Exception):
    """The text is no expression that this parser knows."""


def tokens(text: str) -> list[str]:
    """Numbers, commands and characters; spacing left out, every dash a minus."""
    text = text.replace("\\!", "").replace("{,}", ",").replace("$", "")
    for dash in MINUS:
        text = text.replace(dash, "-")
    return [match[0] for match in TOKEN.finditer(text) if not match[0].isspace() and match[0] not in SPACING]


@dataclass
class Parser:
    """Recursive descent over the tokens of one expression, at one value of its letters."""

    rest: list[str]
    place: float

    def peek(self) -> str:
        return self.rest[0] if self.rest else ""

    def take(self) -> str:
        if not self.rest:
            raise NotAnExpressionError
        return self.rest.pop(0)

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise NotAnExpressionError

    def whole(self) -> complex:
        """The value of all that is there."""
        value = self.sum()
        if self.rest:
            raise NotAnExpressionError
        return value

    def sum(self) -> complex:
        value = self.product()
        while self.peek() in ("+", "-"):
            sign = self.take()
            value = value + self.product() if sign == "+" else value - self.product()
        return value

    def product(self) -> complex:
        if self.peek() in ("+", "-"):
            return -self.product() if self.take() == "-" else self.product()
        value = self.power()
        while token := self.peek():
            if token in ("\\cdot", "\\times", "*", "\\div", "/"):
                self.take()
                factor = self.product() if self.peek() in ("+", "-") else self.power()
                value = value * factor if token not in ("\\div", "/") else value / factor
            elif token in ("+", "-", ")", "}", "]", ","):
                break
            else:
                value = value * self.power()
        return value

    def power(self) -> complex:
        value = self.atom()
        while self.peek() in ("^", "\\%", "%", "\\circ"):
            if self.take() == "^":
                if self.peek() == "\\circ":
                    self.take()
                    continue
                value = value ** self.argument()
        return value

    def argument(self) -> complex:
        """A group in braces, a command, or one character: of a number its first digit."""
        if self.peek() == "{":
            self.take()
            value = self.sum()
            self.expect("}")
            return value
        if self.peek()[:1].isdigit():
            digits = self.take()
            if digits[1:]:
                self.rest.insert(0, digits[1:])
            return complex(int(digits[0]))
        return self.atom()

    def atom(self) -> complex:
        token = self.take()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return complex(float(token.replace(",", "")))
        if token in ("(", "{", "["):
            value = self.sum()
            self.expect({"(": ")", "{": "}", "[": "]"}[token])
            return value
        if token in ("\\frac", "\\dfrac", "\\tfrac", "\\cfrac"):
            top = self.argument()
            return top / self.argument()
        if token == "\\sqrt":
            degree: complex = 2
            if self.peek() == "[":
                self.take()
                degree = self.sum()
                self.expect("]")
            return self.argument() ** (1 / degree)
        if token == "\\pi":
            return cmath.pi + 0j
        if token.isalpha() or (token[0] == "\\" and token[1:].isalpha() and token not in NOT_LETTERS):
            return complex(self.place + sum(map(ord, token)) % 17 / 10)
        raise NotAnExpressionError


NOT_LETTERS = {
    "\\text",
    "\\mathrm",
    "\\mathbf",
    "\\boxed",
    "\\cup",
    "\\in",
    "\\begin",
    "\\end",
    "\\sin",
    "\\cos",
    "\\log",
}


def values(text: str) -> list[complex] | None:
    """Its values at each place; None if it is no expression."""
    try:
        return [Parser(tokens(text), place).whole() for place in PLACES]
    except (NotAnExpressionError, ZeroDivisionError, OverflowError, RecursionError):
        return None


def bare(text: str) -> str:
    """Without boxes, fonts, currency, units behind a number, and signs of markup."""
    while box := re.fullmatch(r"\s*\\(?:boxed|fbox)\s*\{(.*)\}\s*", text, re.DOTALL):
        text = box[1]
    text = text.replace("\\$", "").replace("$", "")
    text = re.sub(r"(?<=[\d}])(?:\\[ ,;]|\s)*\\(?:text|mathrm)\s*\{\s*[a-z]+[\s^\d]*\}\s*$", "", text)
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"[*`~]", "", text).strip().strip("_").removesuffix(".")


def wording(text: str) -> str:
    """The letters, without blanks."""
    return re.sub(r"\s|\\(?:left|right|[,;:! ])", "", bare(text))


def elements(text: str) -> tuple[str, list[str]] | None:
    """The brackets and the parts of a tuple, interval or set, or of several answers; None for anything else."""
    text = re.sub(r"\\left|\\right", "", text).replace("\\{", "{").replace("\\}", "}").strip()
    text = re.sub(r"\s+(?:or|and)\s+|;", ",", text)
    if not re.fullmatch(r"[(\[{].*[)\]}]", text):
        text = f"{{{text}}}" if re.search(r",\s|,(?!\d{3}(?!\d))", text.replace("{,}", "")) else ""
    if not text:
        return None
    parts, depth, start, inner = [], 0, 0, text[1:-1]
    for i, char in enumerate(inner):
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return None
        if char == "," and depth == 0:
            parts.append(inner[start:i])
            start = i + 1
    return (text[0] + text[-1], [*parts, inner[start:]]) if parts else None


def equal(answer: str, truth: str) -> bool:
    """Whether both say the same."""
    answer, truth = bare(answer), bare(truth)
    if wording(answer) == wording(truth):
        return True
    lists = elements(answer), elements(truth)
    if lists[0] is not None and lists[1] is not None:
        (brackets, left), (others, right) = lists
        if brackets == others == "{}":
            return len(left) == len(right) and all(any(equal(a, b) for b in right) for a in left)
        return brackets == others and len(left) == len(right) and all(map(equal, left, right))
    if "=" in answer and not re.search(r"[<>!]=|\\[lg]e", answer):
        return equal(answer.rpartition("=")[2], truth.rpartition("=")[2])
    first, second = values(answer), values(truth)
    if first is None or second is None:
        return False
    return all(abs(a - b) <= 1e-9 * max(1.0, abs(b)) for a, b in zip(first, second, strict=True))
