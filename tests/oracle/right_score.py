r"""What an answer is worth, from the rules as they are told, without Tandem and without math-verify."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction

from tests.oracle.oracle_file import Case
from tests.oracle.oracle_verdict import REFUSED, Right
from tests.oracle.right_math import MINUS, equal

DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?|\.\d+"
NUMBER = re.compile(rf"(?<![0-9A-Za-z)\]])([-+]?)[$€£]?({DIGITS})|({DIGITS})", re.ASCII)


def ascii_signs(text: str) -> str:
    """Every dash as a minus, except between two letters or digits; every separator of thousands as a comma."""
    for dash in MINUS:
        text = re.sub(rf"(?<![0-9A-Za-z]){dash}|{dash}(?![0-9A-Za-z])", "-", text)
    return text.replace("＋", "+").replace("{,}", ",").replace("\\$", "$").replace(",\\!", ",").replace("\\,", ",")


def numbers(text: str) -> list[Decimal]:
    """All numbers in order. Within brackets that hold only numbers, and in square ones, a comma separates."""
    text = ascii_signs(text)
    text = re.sub(r"\[[^\[\]]*\]|[({][-+\d.,\s]*[)}]", lambda found: found[0].replace(",", ", "), text)
    found = []
    for match in NUMBER.finditer(text):
        value = Decimal((match[2] or match[3]).replace(",", ""))
        found.append(-value if match[1] == "-" else value)
    return found


def marked(text: str) -> Decimal | None:
    """The number right behind the last ``#### `` that a single one follows, markup aside."""
    for part in reversed(re.split(r"####(?=[ \t])", ascii_signs(text))[1:]):
        line = re.sub(r"\\(?:boxed|text|textbf|mathbf|mathrm)\{|\\\(|</?[a-z]+>", "", part.split("\n")[0])
        line = line.lstrip(" \t*_`~$\"'")
        match = re.match(rf"([-+]?)[$€£]?({DIGITS})(?![,/]\d)", line, re.ASCII)
        if match:
            value = Decimal(match[2].replace(",", ""))
            return -value if match[1] == "-" else value
    return None


def right_gsm8k(case: Case) -> Right:
    """1 for the right number, ``format_score`` for another one, 0 for none."""
    given = case.inputs
    truth = numbers(given["ground_truth"])
    if not truth:
        return REFUSED
    found = numbers(given["solution"]) if given["method"] == "flexible" else [marked(given["solution"])]
    if not found or found[-1] is None:
        return {"score": 0.0}
    return {"score": 1.0 if found[-1] == truth[-1] else float(given.get("format_score", 0.0))}


def boxes(text: str) -> list[str]:
    """What each closed box holds that lies in no other, and bare ones (``\\boxed 7``)."""
    return [text[start:end] for start, end in box_places(text)]


def box_places(text: str) -> Iterator[tuple[int, int]]:
    at = 0
    while match := re.compile(r"\\(?:boxed|fbox)\s*\{|\\boxed\s+(?=[^\s{}$])").search(text, at):
        if not match[0].endswith("{"):
            end = re.compile(r"[\s{}$]|$").search(text, match.end())
            assert end is not None
            yield match.end(), end.start()
            at = match.end()
            continue
        depth, i = 1, match.end()
        while i < len(text) and depth:
            step = 2 if text[i] == "\\" else 1
            depth += (text[i] == "{") - (text[i] == "}") if step == 1 else 0
            i += step
        if not depth:
            yield match.end(), i - 1
        at = i if not depth else match.end()


def right_math(case: Case) -> Right:
    """The last box, else the last mathematics or number, against the truth."""
    truth, solution = case.inputs["ground_truth"], case.inputs["solution"]
    if not truth.strip():
        return REFUSED
    found = boxes(solution)
    if not found:
        found = re.findall(r"\$([^$]+)\$", solution) or [str(value) for value in numbers(solution)]
    return {"score": float(bool(found) and equal(found[-1], truth))}


UNITS = r"\\?%|dollars?|cents?|degrees?|percent|points?|units?|(?:square )?(?:inches|feet|meters?|miles?|cm|km|m)"


def spelt(text: str) -> str:
    """An answer in its plain spelling."""
    found = boxes(text)
    text = found[-1] if found else text
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", ascii_signs(text)).replace("$", "")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*([0-9a-zA-Z])\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}", text)
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\(?:left|right)(?![a-zA-Z])|\\[,;!: ]", "", text)
    text = text.strip(" \t\r\n*_`\"'")
    if not re.search(r"[<>!]=", text):
        text = text.rpartition("=")[2]
    text = re.sub(rf"(?i)^([-+]?\s*(?:{DIGITS}))\s*(?:{UNITS})\.?\s*$", r"\1", text.strip())
    text = re.sub(r"\s", "", text)
    text = text[:-1] if text.endswith(".") and not text.endswith("..") else text
    return text.replace(",", "") if re.fullmatch(rf"[-+]?(?:{DIGITS})", text, re.ASCII) else text


def same(answer: str, truth: str) -> bool:
    """Equal as numbers or as plainly spelt text; a fraction that can be reduced is another text."""
    answer, truth = spelt(answer), spelt(truth)
    if re.fullmatch(r"[-+]?[\d.]*\d", answer) and re.fullmatch(r"[-+]?[\d.]*\d", truth):
        return Decimal(answer) == Decimal(truth)
    pairs = [re.fullmatch(r"([-+]?)(?:\\frac\{([-+]?\d+)\}\{(\d+)\}|(\d+)/(\d+))", text) for text in (answer, truth)]
    if all(pairs):
        parts = [(m[1] + (m[2] or m[4]).lstrip("+"), m[3] or m[5]) for m in pairs if m]
        (a, b), (c, d) = ((Fraction(int(top.replace("--", "").replace("+", ""))), int(low)) for top, low in parts)
        return (a, b) == (c, d)
    return unbraced(answer) == unbraced(truth)


def unbraced(text: str) -> str:
    """Scripts of one character without braces; no plus in front."""
    return re.sub(r"([\^_])\{([0-9a-zA-Z])\}", r"\1\2", text.removeprefix("+"))


def dapo(solution: str, truth: str, strict: bool) -> tuple[bool, str | None]:
    """Whether the answer is right, and what it is: the last answer line or, without one, the last box."""
    lines = [] if strict else re.findall(r"(?i)answer\s*:\s*([^\n]*\S)", solution)
    found = lines[-1] if lines else next(iter(boxes(solution)[-1:]), None)
    return (False, None) if found is None else (same(found, truth), spelt(found))


def right_dapo(case: Case) -> Right:
    """Score, accuracy and the answer as it was read."""
    strict = case.inputs["strict_box_verify"]
    right, found = dapo(case.inputs["solution"], case.inputs["ground_truth"], strict)
    missing = None if strict else "[INVALID]"  # the reference's two ways to say it
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": missing if found is None else found}


def right_route(case: Case) -> Right:
    """The result of the scorer that a data source stands for, where it is DAPO's."""
    right, _ = dapo(case.inputs["solution"], case.inputs["ground_truth"], False)
    return {"result": 1.0 if right else -1.0, "acc": right}


def right_length(case: Case) -> Right:
    """Nothing up to the buffer, then a line, and the full penalty from the longest response on."""
    given = case.inputs
    over = given["response_length"] - (given["max_resp_len"] - given["buffer_len"])
    return {"reward": given["base_score"] - given["penalty_factor"] * min(max(over, 0) / given["buffer_len"], 1.0)}
