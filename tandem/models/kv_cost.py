"""What keys and values of rows in flight cost, in bytes. Importing this costs no torch, so that a plan can read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

COLUMNS = 64
"""Columns that tables of keys and values grow by at least; their widths are multiples of it."""


@dataclass(frozen=True)
class Rows:
    """Rows of one prompt that are in flight: ``rows`` of them, ``prompt`` tokens, and ``answer`` tokens at most each.

    ``shared``: the prompt's keys and values are there once, apart from the rows, even if one row alone is left.
    """

    rows: int
    prompt: int
    answer: int
    shared: bool


@dataclass(frozen=True)
class KVCost:
    """Bytes of keys and values.

    ``token``: of a token in all layers. ``part``: of a token in the largest single tensor, which is there twice while
    it grows. ``row``: of a row, however short, where layers keep a state. ``tables``: rows stand in tables as wide as
    the longest of them, prompts apart where they are shared; else each row is as long as it is, its prompt included.
    """

    token: int
    part: int
    row: int = 0
    tables: bool = True

    @property
    def slot(self) -> int:
        """Bytes to count for a token, so that there is room for the copy while a tensor grows."""
        return self.token + self.part

    def together(self, groups: Iterable[Rows]) -> int:
        """Return the bytes of ``groups`` that share their tables, at the longest that they can become."""
        found = list(groups)
        if not self.tables:
            return sum(self._lone(group) for group in found)
        answers = sum(group.rows for group in found)
        shared = [group for group in found if group.shared]
        width = max((group.answer + (0 if group.shared else group.prompt) for group in found), default=0)
        prompts = len(shared) * columns(max((group.prompt for group in shared), default=0))
        return self.slot * (answers * columns(width) + prompts)

    def apart(self, groups: Sequence[Rows]) -> int:
        """Return the bytes of ``groups`` with tables of their own."""
        return sum(self.together([group]) for group in groups)

    def _lone(self, group: Rows) -> int:
        return group.rows * (2 * self.row + self.slot * (group.prompt + group.answer))


def columns(tokens: int) -> int:
    """Return the width of a table that holds so many tokens."""
    return -(-tokens // COLUMNS) * COLUMNS


def grown(tokens: int) -> int:
    """Return the widest that a table becomes which grows with its rows to so many tokens: by an eighth at a time."""
    width = columns(tokens)
    return width if width <= 9 * COLUMNS else columns(width + width // 8)
