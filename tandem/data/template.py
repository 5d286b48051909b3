"""The template of a prompt: a text in which ``{column}`` stands for a column's value.

It is what ``str.format`` takes, restricted to plain columns with a conversion and a format (``{x:2d}``); and braces
that are no column stand for themselves, so that ``\\boxed{}``, ``\\frac{1}{2}`` and JSON are written as they are.
Braces around what could be a column's name are doubled where they are text: ``{{name}}``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tandem.base.errors import DataError
from tandem.data.rows import Row

_FIELD = re.compile(r"\{([^\W\d]\w*)((?:![rsa])?(?::[^{}]*)?)\}")
_MISTAKE = re.compile(r"\{[^\W\d]\w*(?:$|[.\[][^{}]*\})")
REMEDY = "Write {column} where a column's value belongs, and {{ and }} around a word that is text"


class TemplateError(DataError):
    """A template that can't be meant so, with the ``reason``."""

    def __init__(self, text: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"template {text!r}: {reason}. {REMEDY}")


class _Piece(NamedTuple):
    """A text, or a column and how its value is shown (``!r:2d``)."""

    text: str
    column: str = ""
    form: str = ""


class Template:
    """A template, read before any row is. Raises ``TemplateError``. ``columns`` are those that it names, in order."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._pieces = _read(text)
        self.columns = tuple(dict.fromkeys(piece.column for piece in self._pieces if piece.column))
        if not self.columns:
            raise TemplateError(text, "it names no column, so that all prompts would be equal")

    def fill(self, row: Row) -> str:
        """Return the text with the row's columns. Raises ``RowError``."""
        values = {name: row[name] for name in self.columns}
        try:
            return "".join(
                f"{{{piece.column}{piece.form}}}".format(**values) if piece.column else piece.text
                for piece in self._pieces
            )
        except (ValueError, TypeError) as error:
            raise row.bad("not encodable", f"template {self.text!r} can't show {values!r}: {error}") from error


def _read(text: str) -> list[_Piece]:
    """Read doubled braces as one each; ``}}`` only after a ``{{``: ``\\frac{1}{\\sqrt{2}}`` ends with two that are
    text.
    """
    pieces: list[_Piece] = []
    place, opened = 0, 0
    while place < len(text):
        doubled = text.startswith("{{", place) or (opened > 0 and text.startswith("}}", place))
        if not doubled and (mistake := _MISTAKE.match(text, place)):
            whole = mistake[0].endswith("}")
            raise TemplateError(text, f"{mistake[0]} is no plain column name" if whole else "expected '}' at its end")
        field = None if doubled else _FIELD.match(text, place)
        if field is not None:
            pieces.append(_Piece("", field[1], field[2]))
            place = field.end()
            continue
        if doubled:
            opened += 1 if text[place] == "{" else -1
        stop = place + 1
        while not doubled and stop < len(text) and text[stop] not in "{}":
            stop += 1
        pieces.append(_Piece(text[place:stop]))
        place = place + 2 if doubled else stop
    return pieces
