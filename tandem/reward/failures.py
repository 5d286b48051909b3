"""What came of all scorings of a run: how many gave a reward, and what was said of those that didn't."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tandem.reward.outcome import PROCESS, Outcome, Scores

logger = logging.getLogger(__name__)

_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|-?\d+(?:\.\d+)?")
_KINDS_WARNED = 5
_KINDS_TOLD = 3
_MOST_KINDS = 1000


class Failures:
    """Counts scorings by outcome, and failures by kind: texts that differ only in numbers and quoted words are one.

    The first of each kind is warned of, so that a scorer that fails on a part of the rows is known of at once and not
    by a mean that leaves those rows out. ``str`` is all of it, with the text of the most frequent kinds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._texts: dict[str, str] = {}  # of each kind, the first

    def add(self, scores: Scores) -> None:
        """Count the scorings of a group."""
        new: list[tuple[str, str]] = []
        with self._lock:
            self._outcomes.update(map(str, scores.outcomes))
            for name, outcome, reason in zip(scores.names, scores.outcomes, scores.reasons, strict=True):
                if outcome is Outcome.SCORED:
                    continue
                kind = _VARYING.sub("…", reason)
                if kind not in self._kinds and len(self._kinds) >= _MOST_KINDS:
                    kind = "of further kinds"
                self._kinds[kind] += 1
                if kind not in self._texts:
                    self._texts[kind] = reason
                    new.append((name, reason))
            count = len(self._texts)
        for place, (name, reason) in enumerate(new, start=count - len(new)):
            # A process that is lost is reported by the pool, the moment it is: it costs more than a reward.
            if place < _KINDS_WARNED and not reason.startswith(PROCESS):
                logger.warning(
                    "no reward for %s: %s. It counts in no mean; the end of the run says how many", name, reason
                )

    @property
    def total(self) -> int:
        """The number of scorings so far."""
        return sum(self._outcomes.values())

    @property
    def failed(self) -> int:
        """The number of scorings that gave no reward."""
        return self.total - self._outcomes[Outcome.SCORED]

    def __str__(self) -> str:
        with self._lock:
            kinds = self._kinds.most_common(_KINDS_TOLD)
            parts = [f"{count} x {self._texts[kind]}" for kind, count in kinds]
            rest = sum(self._kinds.values()) - sum(count for _, count in kinds)
            text = f"{self._outcomes[Outcome.SCORED]} of {self.total} answers scored, {self.failed} without a reward"
        return text + (": " if parts else "") + "; ".join([*parts, *([f"{rest} of other kinds"] if rest else [])])

    def state_dict(self) -> dict[str, Any]:
        """Return all counts, as JSON data."""
        with self._lock:
            return {"outcomes": dict(self._outcomes), "kinds": dict(self._kinds), "texts": dict(self._texts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from ``state``: of the part of a run that came before."""
        with self._lock:
            self._outcomes.update(state["outcomes"])
            self._kinds.update(state["kinds"])
            self._texts = {**state["texts"], **self._texts}
