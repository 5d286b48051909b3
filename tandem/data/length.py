"""The length policy, at its one place: what is cut here is what the engine and the trainer both get."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class Overlong(StrEnum):
    """What to do with a sequence longer than its limit.

    ``left`` cuts from the left and keeps the last tokens, and the begin token before them where there is one; ``right``
    cuts from the right and keeps the first.
    """

    ERROR = "error"
    DROP = "drop"
    LEFT = "left"
    RIGHT = "right"


def cut(tokens: Sequence[T], limit: int, policy: Overlong, *, begins: int = 0) -> Sequence[T]:
    """Return at most ``limit`` of ``tokens``, from the end that ``policy`` (left or right) keeps.

    The first ``begins`` of them stay if there is room for more than these.
    """
    if len(tokens) <= limit:
        return tokens
    if policy is not Overlong.LEFT:
        return tokens[:limit]
    kept = begins if begins < limit else 0
    return [*tokens[:kept], *tokens[len(tokens) - limit + kept :]]
