"""The length policy, at its one place: what is cut here is what the engine and the trainer both get."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class Overlong(StrEnum):
    """What to do with a sequence longer than its limit.

    ``left`` cuts from the left and keeps the last tokens; ``right`` cuts from the right and keeps the first.
    """

    ERROR = "error"
    DROP = "drop"
    LEFT = "left"
    RIGHT = "right"


def cut(tokens: Sequence[T], limit: int, policy: Overlong) -> Sequence[T]:
    """At most ``limit`` of ``tokens``, from the end that ``policy`` (left or right) keeps."""
    if len(tokens) <= limit:
        return tokens
    return tokens[len(tokens) - limit :] if policy is Overlong.LEFT else tokens[:limit]
