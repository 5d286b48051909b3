"""A reward of one's own: a function of what it needs to see of a sample."""

from __future__ import annotations

import re


def last_number(response: str, ground_truth: int) -> float:
    """1 if the last number in the answer is the right one: a model that talks until it is cut gets nothing."""
    numbers = re.findall(r"\d+", response)
    return float(numbers[-1:] == [str(ground_truth)])
