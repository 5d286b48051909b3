"""In which order the tickets of a partition are given out: groups that will take long first. Pure.

Engines that ask for the next group whenever they have room are a list schedule, whose end is late by at most the group
that was begun last (Graham, "Bounds on multiprocessing timing anomalies", 1969): so that one should be short.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

_LEAST = 0.25
"""How much the newest length counts at least: a policy that learns writes other lengths."""


class LengthHistory:
    """How long the answers to a prompt were, to say how long the next will be; for any threads."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[int, float]] = {}
        self._lock = threading.Lock()

    def note(self, prompt: Hashable, length: float) -> None:
        """Note the ``length`` of answers to a prompt."""
        with self._lock:
            count, mean = self._seen.get(prompt, (0, 0.0))
            weight = max(1.0 / (count + 1), _LEAST)
            self._seen[prompt] = count + 1, mean + weight * (length - mean)

    def predicted(self, prompt: Hashable) -> float | None:
        """Return the length that answers to a prompt will have; None of one that was never answered."""
        with self._lock:
            found = self._seen.get(prompt)
        return None if found is None else found[1]


def longest_first(
    predicted: Callable[[Hashable], float | None], prompt_of: Callable[[int, int], Hashable], tickets: int
) -> Callable[[int], list[int]]:
    """Return what orders the places of a partition by what is ``predicted`` of their prompts.

    ``prompt_of`` takes partition and place. Those of which nothing is known are taken for average ones; equals stay in
    ticket order, so that without any history that is the order.
    """

    def order(partition: int) -> list[int]:
        lengths = [predicted(prompt_of(partition, place)) for place in range(tickets)]
        known = [length for length in lengths if length is not None]
        average = sum(known) / len(known) if known else 0.0
        expected = [average if length is None else length for length in lengths]
        return sorted(range(tickets), key=lambda place: (-expected[place], place))

    return order
