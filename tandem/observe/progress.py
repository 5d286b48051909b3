"""The line that a person watches: step, reward, KL, length, tokens per second, time left."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tandem.base import phases
from tandem.observe.cell import CellLine

B = TypeVar("B", bound=Callable[..., Any])

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

BEAT_S = 30.0
"""In a log something is said at least so often."""

BAR_WIDTH = 20
LAST_STEPS = 10
"""Steps whose numbers a notebook shows below the line."""
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
    """A tracker that redraws one line on a terminal or in a notebook, and prints lines elsewhere.

    The line says what goes on, how far that is and for how long, also between two steps. ``total_steps`` is None where
    the end isn't known (no bar, no time left). Without a terminal at most one line per ``plain_interval`` seconds is
    printed, the last step always; where nothing was for ``beat_s`` seconds (None: never mind), what goes on is printed.
    """

    def __init__(
        self,
        total_steps: int | None,
        *,
        first_step: int = 0,
        console: Console | None = None,
        plain_interval: float = 1.0,
        beat_s: float | None = BEAT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        StartLine.give_way()
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
        self._last: deque[dict[str, str]] = deque(maxlen=LAST_STEPS)
        self._live = _redrawn(self._cell if self._console.is_jupyter else self._render, self._console)
        self._beats: _Beats | None = None
        if self._live is not None:
            self._live.start()
        elif beat_s is not None:
            self._beats = _Beats(self._console, beat_s, self._head)

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
        self._last.append({"step": str(step), **self._shown})
        if self._live is None and self._due(now):
            self._print(now)

    def finish(self) -> None:
        """Leave the last state on the screen."""
        if self._beats is not None:
            self._beats.end()
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
        if self._beats is not None:
            self._beats.hold()
        parts = [self._head(), *self._metrics(), *self._left()]
        self._console.print(Text("  ").join(parts), soft_wrap=True, highlight=False)

    def _render(self) -> Text:
        """Return the line as the terminal has room for it: the bar goes first, then metrics from the last one on, then
        what goes on; the step and the time left stay.
        """
        going, metrics, left = phases.current(), self._metrics(), self._left()
        doing = [] if going is None else [phase_text(going)]
        width = self._console.width
        line = Text("  ").join([self._head(), *doing, *metrics, *left])
        if self._total is not None and line.cell_len + BAR_WIDTH < width:
            filled = min(BAR_WIDTH, BAR_WIDTH * self._step // max(1, self._total))
            line = Text.assemble(("━" * filled, "green"), ("━" * (BAR_WIDTH - filled), "bright_black"), " ", line)
        while line.cell_len > width and (metrics or doing):
            (metrics or doing).pop()
            line = Text("  ").join([self._head(), *doing, *metrics, *left])
        line.no_wrap, line.overflow = True, "ellipsis"
        return line

    def _cell(self) -> Text:
        """Return the line, and under it a table of the last steps: in a notebook there is room."""
        rows = list(self._last)
        names = ["step", *(label for label, _, _ in FIELDS if label in self._shown)] if rows else []
        lines = [[name.rjust(max(len(name), *(len(row.get(name, "")) for row in rows))) for name in names]]
        lines += [
            [row.get(name, "").rjust(len(head)) for name, head in zip(names, lines[0], strict=True)] for row in rows
        ]
        return Text("\n").join([self._render(), *(Text("  ".join(line)) for line in lines if line)])

    def _head(self) -> Text:
        total = "" if self._total is None else f"/{self._total}"
        return Text.assemble((f"step {self._step}{total}", "bold"))

    def _metrics(self) -> list[Text]:
        shown = [label for label, _, _ in FIELDS if label in self._shown]
        return [Text.assemble((f"{label} ", "dim"), self._shown[label]) for label in shown]

    def _left(self) -> list[Text]:
        left = self.seconds_left()
        return [] if left is None else [Text.assemble(("left ", "dim"), format_seconds(left))]


def phase_text(going: phases.Phase) -> Text:
    """Return what goes on: its name, how far it is, for how long, and how fast."""
    seconds = time.monotonic() - going.began
    count = f" {going.done}/{going.total}" if going.total is not None else f" {going.done}" if going.done else ""
    rate = f" {going.done / seconds:.3g}/s" if going.done and seconds >= 1 else ""
    return Text.assemble((going.name, "cyan"), count, (f" {format_seconds(seconds)}{rate}", "dim"))


def _redrawn(draw: Callable[[], Text], console: Console, *, transient: bool = False) -> Live | CellLine | None:
    """Return what draws a line again and again: on a terminal, or in a notebook; None where nothing can."""
    if console.is_jupyter:
        return CellLine(draw, transient=transient)
    if console.is_terminal:
        return Live(get_renderable=draw, console=console, refresh_per_second=2, transient=transient)
    return None


class StartLine:
    """What goes on before a run's own line is there: loading, starting engines; a context around that.

    On a terminal a line that is redrawn, elsewhere one every ``beat_s`` seconds. It gives way to a ``ProgressLine``.
    """

    _now: StartLine | None = None

    def __init__(self, *, shown: bool = True, console: Console | None = None, beat_s: float = BEAT_S) -> None:
        self._shown, self._beat_s = shown, beat_s
        self._console = Console() if console is None else console
        self._live: Live | CellLine | None = None
        self._beats: _Beats | None = None

    def __enter__(self) -> StartLine:
        self._live = _redrawn(self._render, self._console, transient=True) if self._shown else None
        if self._live is not None:
            self._live.start()
        elif self._shown:
            self._beats = _Beats(self._console, self._beat_s, lambda: Text("starting"))
        StartLine._now = self
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Take the line away."""
        StartLine._now = None
        if self._live is not None:
            self._live.stop()
        if self._beats is not None:
            self._beats.end()
        self._live = self._beats = None

    @classmethod
    def give_way(cls) -> None:
        """End the line that is there, if there is one: a terminal has room for one that is redrawn."""
        if cls._now is not None:
            cls._now.end()

    def _render(self) -> Text:
        going = phases.current()
        line = Text("starting") if going is None else phase_text(going)
        line.no_wrap, line.overflow = True, "ellipsis"
        return line


def shows_start(build: B) -> B:
    """Return ``build``, which makes a run from its config, with a line of what goes on until the run has its own.

    It is shown where the run has the console.
    """

    @wraps(build)
    def shown(config: Any, *rest: Any) -> Any:
        with StartLine(shown="console" in config.trainer.logger), phases.phase("loading"):
            return build(config, *rest)

    return cast(B, shown)


class _Beats:
    """Prints a plain line whenever there was none for ``beat_s`` seconds while something goes on."""

    def __init__(self, console: Console, beat_s: float, head: Callable[[], Text]) -> None:
        self._console, self._beat_s, self._head = console, beat_s, head
        self._printed, self._ended = threading.Event(), threading.Event()
        threading.Thread(target=self._work, name="progress", daemon=True).start()

    def hold(self) -> None:
        """Note that a line was printed."""
        self._printed.set()

    def end(self) -> None:
        """Print nothing from here on."""
        self._ended.set()
        self._printed.set()

    def _work(self) -> None:
        while not self._ended.is_set():
            was_printed = self._printed.wait(self._beat_s)
            self._printed.clear()
            going = phases.current()
            if not was_printed and not self._ended.is_set() and going is not None:
                line = Text("  ").join([self._head(), phase_text(going)])
                self._console.print(line, soft_wrap=True, highlight=False)
