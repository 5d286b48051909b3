"""What scorings may cost in money: counted in a file that scoring processes share, and a run with those after it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.base.errors import RewardError

_MILLION = 1_000_000
_WIDTH = 32  # characters of the file: it is written over at once, so that no reader sees half of a number


@dataclass(frozen=True)
class Purse:
    """At most ``budget`` for all that is asked with this ``file``, at prices per million tokens, in the same currency.

    Whoever asks takes the most that an answer may cost before it asks, and puts back what was not used: so the budget
    holds however many ask at once, and what was under way when a process was killed counts as spent.
    """

    file: Path
    budget: float
    input_price: float
    output_price: float

    def take(self, content: str, most_output: int) -> float:
        """Take the most that a question may cost, a token for each of its bytes, and return that.

        Raises ``RewardError`` where the budget has less left, and where the file can't be read or written.
        """
        most = self.cost(len(content.encode("utf-8", "replace")), most_output)
        self._add(most, limit=self.budget)
        return most

    def settle(self, taken: float, usage: Any) -> float:
        """Put back what of ``taken`` was not used, by what the reply says of its tokens; return what it cost.

        A reply that says nothing of them costs all that was taken.
        """
        counts = usage if isinstance(usage, Mapping) else {}
        asked, answered = counts.get("prompt_tokens"), counts.get("completion_tokens")
        if type(asked) is not int or type(answered) is not int or min(asked, answered) < 0:
            return taken
        cost = self.cost(asked, answered)
        self._add(cost - taken)
        return cost

    def put_back(self, taken: float) -> None:
        """Put back what was taken for a question that was not answered and costs nothing."""
        self._add(-taken)

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Return what so many tokens cost."""
        return (input_tokens * self.input_price + output_tokens * self.output_price) / _MILLION

    def spent(self) -> float:
        """Return what the file counts."""
        return self._add(0.0)

    def _add(self, amount: float, limit: float | None = None) -> float:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            place = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RewardError(f"{self.file}: what was spent can't be counted there: {error.strerror}") from None
        try:
            fcntl.flock(place, fcntl.LOCK_EX)
            text = os.pread(place, 2 * _WIDTH, 0).decode("ascii", "replace").strip()
            try:
                before = float(text or 0)
            except ValueError:
                raise RewardError(f"{self.file} holds {text[:40]!r}, not what was spent: name another file") from None
            after = max(0.0, before + amount)
            if limit is not None and after > limit:
                more = f"{before:.4g}, and the next question may cost {amount:.2g}"
                raise RewardError(f"the budget of {limit:g} is spent ({more}: {self.file})")
            if after != before:
                os.pwrite(place, f"{after:.12g}".ljust(_WIDTH - 1).encode() + b"\n", 0)
            return after
        except OSError as error:
            raise RewardError(f"{self.file}: what was spent can't be counted there: {error.strerror}") from None
        finally:
            os.close(place)
