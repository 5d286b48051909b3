"""All trackers of a run behind one handle. One of them never ends or slows a run: it fails alone, with a warning."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from tandem.base.registry import Entry
from tandem.observe.trackers.fence import Beside, Guarded
from tandem.observe.trackers.protocol import (
    TRACKERS,
    NotesEnd,
    RunEnd,
    RunInfo,
    ShowsDistributions,
    ShowsSamples,
    Tracker,
)

END_S = 60.0
"""Seconds that all trackers together have at the end of a run to take what is still waiting for them."""

TABLES = 100
"""About how many tables of samples a tracker is given over a whole run."""


class Trackers:
    """All trackers of a run behind one call; ``metrics.jsonl`` is always among them.

    Raises:
        UnknownNameError: a name that no tracker has.
    """

    def __init__(self, names: Sequence[str], run: RunInfo) -> None:
        ordered = list(dict.fromkeys(["jsonl", *names]))
        entries = [TRACKERS[name] for name in ordered]
        self._total = run.total_steps
        self._guarded = [_fenced(entry, run) for entry in entries]
        for guarded in self._guarded:
            guarded.start()

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Hand one step's metrics to every tracker; never raises for a tracker's sake."""
        numbers = {key: _number(value) for key, value in metrics.items()}
        for guarded in self._guarded:
            guarded.give(lambda tracker: tracker.log(step, dict(numbers)))

    def distributions(self, step: int, find: Callable[[], Mapping[str, Sequence[float]]]) -> None:
        """Hand what ``find`` gives to the trackers that show distributions; it isn't called where none does."""
        asked = [guarded for guarded in self._guarded if guarded.may("distributions")]
        values = find() if asked else {}

        def show(tracker: Tracker) -> None:
            if isinstance(tracker, ShowsDistributions):
                tracker.distributions(step, values)

        for guarded in asked if values else ():
            guarded.give(show)

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Hand a few samples to the trackers that show them: of every step, or so that a long run has about
        ``TABLES`` tables.
        """
        every = 1 if self._total is None else max(1, self._total // TABLES)
        if not rows or (step % every and step != self._total):
            return

        def show(tracker: Tracker) -> None:
            cast(ShowsSamples, tracker).samples(step, rows) if isinstance(tracker, ShowsSamples) else None

        for guarded in self._guarded:
            if guarded.may("samples"):
                guarded.give(show)

    def finish(self, end: RunEnd | None = None) -> None:
        """End every tracker, and tell how the run ended; call it once, also when the run failed."""
        how = RunEnd() if end is None else end

        def finish(tracker: Tracker) -> None:
            try:
                if isinstance(tracker, NotesEnd):
                    tracker.ended(how)
            finally:
                tracker.finish()

        for guarded in self._guarded:
            guarded.end(finish)
        until = time.monotonic() + END_S
        for guarded in self._guarded:
            guarded.settle(until)


def _fenced(entry: Entry[Callable[[RunInfo], Tracker]], run: RunInfo) -> Guarded:
    kind = Guarded if entry.traits.get("inline") else Beside
    return kind(entry.name, entry.target, run)


def _number(value: object) -> object:
    """Return the Python number of a numpy or torch scalar; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
