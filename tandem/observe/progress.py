"""The line that a person watches: step, reward, KL, length, tokens per second, time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.live import Live
from rich.text import Text

FIELDS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("scored", "reward/scored_share", "{:.0%}"),
    ("loss", "loss/sft", "{:.4f}"),
    ("accuracy", "preference/accuracy", "{:.3f}"),
    ("margin", "preference/margin", "{:.3f}"),
    ("eval", "eval/reward", "{:.3f}"),
    ("eval scored", "eval/scored_share", "{:.0%}"),
    ("eval accuracy", "eval/accuracy", "{:.3f}"),
    ("kl", "kl/mean", "{:.4f}"),
    ("length", "length/mean", "{:.1f}"),
    ("tokens/s", "throughput/tokens_per_second", "{:,.0f}"),
)
"""Shown in this order where a step has the metric: (label, key, format)."""

SHARES = ("reward/scored_share", "eval/scored_share")
"""Shown from the first step on in which they are not all: a mean over some of the answers is another number."""

BAR_WIDTH = 20
SMOOTHING = 0.2
"""Weight of the newest step in the running step time."""


def format_seconds(seconds: float) -> str:
    """Return ``42s``, ``3m 07s``, ``2h 05m``, ``3d 04h``."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes_rest = divmod(minutes, 60)
    days, hours_rest = divmod(hours, 24)
    if days:
        return f"{days}d {hours_rest:02d}h"
    if hours:
        return f"{hours}h {minutes_rest:02d}m"
    if minutes:
        return f"{minutes}m {rest:02d}s"
    return f"{rest}s"


class ProgressLine:
    """A tracker that redraws one line on a terminal and prints lines elsewhere.

    ``total_steps`` is None where the end isn't known (no bar, no time left). Without a terminal at most one line per
    ``plain_interval`` seconds is printed, the last step always.
    """

    def __init__(
        self,
        total_steps: int | None,
        *,
        first_step: int = 0,
        console: Console | None = None,
        plain_interval: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._console = Console() if console is None else console
        self._plain_interval = plain_interval
        self._clock = clock
        self._step = first_step
        self._stepped_at = clock()
        self._step_seconds: float | None = None
        self._shown: dict[str, str] = {}
        self._printed_at: float | None = None
        self._unprinted = False
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2)
            self._live.start()

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Take a step's metrics; keys that are not shown are ignored."""
        now = self._clock()
        if step > self._step:
            seconds = (now - self._stepped_at) / (step - self._step)
            old = seconds if self._step_seconds is None else self._step_seconds
            self._step_seconds = old + SMOOTHING * (seconds - old)
            self._step, self._stepped_at = step, now
        for label, key, form in FIELDS:
            value = metrics.get(key)
            if isinstance(value, int | float) and not (key in SHARES and value == 1 and label not in self._shown):
                self._shown[label] = form.format(value)
        self._unprinted = True
        if self._live is None and self._due(now):
            self._print(now)

    def finish(self) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.stop()
        elif self._unprinted:
            self._print(self._clock())

    def seconds_left(self) -> float | None:
        """Return the expected seconds to the end: remaining steps at the running step time, less what this step already
        took.
        """
        if self._total is None or self._step_seconds is None:
            return None
        spent = self._clock() - self._stepped_at
        return max(0.0, (self._total - self._step) * self._step_seconds - spent)

    def _due(self, now: float) -> bool:
        return self._printed_at is None or now - self._printed_at >= self._plain_interval

    def _print(self, now: float) -> None:
        self._printed_at, self._unprinted = now, False
        self._console.print(self._text(), soft_wrap=True, highlight=False)

    def _render(self) -> Text:
        """Return the line with a bar in front, cut to the width of the terminal."""
        line = self._text()
        if self._total is not None:
            filled = min(BAR_WIDTH, BAR_WIDTH * self._step // max(1, self._total))
            line = Text.assemble(("━" * filled, "green"), ("━" * (BAR_WIDTH - filled), "bright_black"), " ", line)
        line.no_wrap, line.overflow = True, "ellipsis"
        return line

    def _text(self) -> Text:
        total = "" if self._total is None else f"/{self._total}"
        parts = [Text.assemble((f"step {self._step}{total}", "bold"))]
        for label, _, _ in FIELDS:
            if label in self._shown:
                parts.append(Text.assemble((f"{label} ", "dim"), self._shown[label]))
        left = self.seconds_left()
        if left is not None:
            parts.append(Text.assemble(("left ", "dim"), format_seconds(left)))
        return Text("  ").join(parts)
