"""What a session of pytest saw of the mark ``long`` while it collected, before any test was left out by it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Seen:
    """Functions with at least one long case, and all that were collected: file below ``tests/``, and name."""

    long: frozenset[tuple[str, str]]
    collected: frozenset[tuple[str, str]]


SEEN = pytest.StashKey[Seen]()


def seen_in(items: Iterable[pytest.Item]) -> Seen:
    """Read the marks of what was collected."""
    named = [(_place(item), item.get_closest_marker("long") is not None) for item in items]
    return Seen(frozenset(place for place, is_long in named if is_long), frozenset(place for place, _ in named))


def _place(item: pytest.Item) -> tuple[str, str]:
    file, _, name = item.nodeid.partition("::")
    return file.removeprefix("tests/"), name.split("[")[0]
