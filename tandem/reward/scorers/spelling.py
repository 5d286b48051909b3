r"""One spelling for what mathematics is written in: signs, and the short forms of LaTeX (``\frac12``, ``\sqrt\pi``)."""

from __future__ import annotations

import re

MINUS = "-−‐‑‒–—―﹣－"
PLUS = "+＋﹢"
WIDE = str.maketrans("０１２３４５６７８９．", "0123456789.")
"""Digits and point as Chinese and Japanese keyboards write them."""
EMPHASIS = "*_`~"
"""What Markdown puts around words."""

_DASH = re.compile(f"[{MINUS}]")
_IN_PROSE = re.compile(rf"(?<![^\W_])[{MINUS}]|[{MINUS}](?![^\W_])")  # between two letters or digits it joins them
_PLUS = re.compile(f"[{PLUS}]")
_SHORT = re.compile(r"\\(?:[dtc]?frac|[dt]?binom|sqrt)(?![a-zA-Z])")
_STYLED = re.compile(r"\\[dtc](frac|binom)(?![a-zA-Z])")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_SPACE = re.compile(r"\s*")
_OPTION = re.compile(r"\[[^\[\]]*\]")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def plain_signs(text: str, *, prose: bool = False) -> str:
    """Return every dash as ``-``, every plus as ``+`` and wide digits as ASCII; in ``prose`` not a dash between two
    letters or digits (``2–3``).
    """
    return _PLUS.sub("+", (_IN_PROSE if prose else _DASH).sub("-", text.translate(WIDE)))


def spelled_out(text: str) -> str:
    r"""Return short forms with their braces: ``\frac ab``, ``\dfrac\pi4``, ``\frac{a}b`` -> ``\frac{a}{b}``; alike for
    ``\sqrt`` and ``\binom``. As in TeX an argument is a group in braces, a command, or one character. One pass.
    """
    text = _STYLED.sub(r"\\\1", text)
    closed, ends = _groups(text), dict[int, int]()
    braces: dict[int, str] = {}
    blanks: dict[int, int] = {}
    for command in reversed(list(_SHORT.finditer(text))):  # those inside an argument come before it
        at = command.end()
        if option := _OPTION.match(text, at):
            at = option.end()
        for _ in range(1 if command[0] == "\\sqrt" else 2):
            start = _blanks(text, at)
            end = _end_of_argument(text, start, closed, ends)
            if end is None:
                break
            blanks[at] = start
            if text[start] != "{":
                braces[start] = braces.get(start, "") + "{"
                braces[end] = "}" + braces.get(end, "")
            at = end
        ends[command.start()] = at
    return _rewritten(text, braces, blanks)


def _rewritten(text: str, braces: dict[int, str], blanks: dict[int, int]) -> str:
    """Return ``text`` with braces put in at their places, without the blanks from a place to another."""
    pieces, at = [], 0
    for place in sorted({*braces, *blanks}):
        pieces += [text[at:place], braces.get(place, "")]
        at = max(place, blanks.get(place, place))
    return "".join([*pieces, text[at:]])


def _groups(text: str) -> dict[int, int]:
    """Return where each group in braces opens, and the place behind its end."""
    opened, closed = [], {}
    for found in _BRACE.finditer(text):
        if found[0] == "{":
            opened.append(found.start())
        elif found[0] == "}" and opened:
            closed[opened.pop()] = found.end()
    return closed


def _blanks(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _end_of_argument(text: str, start: int, closed: dict[int, int], ends: dict[int, int]) -> int | None:
    """Return the place behind a group, a command (with its own arguments, or a group), a letter or digit; None where
    there is none.
    """
    if start >= len(text):
        return None
    if text[start] == "{":
        return closed.get(start)
    if text[start] != "\\":
        return start + 1 if text[start].isalnum() else None
    if start in ends:
        return ends[start]
    command = _COMMAND.match(text, start)
    if command is None:
        return None
    return closed.get(command.end(), command.end())
