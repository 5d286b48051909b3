"""Waits that end. A ``Deadline`` says when; whoever waits says for whom."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tandem.base.errors import DeadlineError


@dataclass(frozen=True)
class Deadline:
    """``seconds`` from now on the monotonic clock."""

    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """The seconds that are left, never negative."""
        return max(0.0, self.started + self.seconds - time.monotonic())

    def check(self, awaited: str, blocker: str) -> None:
        """Raise ``DeadlineError`` once the time is over; names what was awaited and who blocks."""
        if self.left == 0.0:
            raise DeadlineError(f"waited {self.seconds:g} s for {awaited}; blocked by {blocker}")
