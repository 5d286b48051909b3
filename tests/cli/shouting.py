"""A reward that any process can import."""

from __future__ import annotations


def share(response: str) -> float:
    """The share of the answer that is upper case."""
    return sum(map(str.isupper, response)) / max(1, len(response))
