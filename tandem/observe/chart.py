"""Curves as inline SVG: no script, no external resource; colours are the page's CSS variables ``--s1 ... --s6``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 520, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 26
MAX_POINTS = 400
SMOOTH_FROM = 30
"""From so many points on a curve is drawn faint, with its running mean over it."""
COLOURS = 6

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A named curve of (x, y) in x order; points without a finite value are simply absent.

    ``dots`` marks every point: for what is measured only now and then.
    """

    name: str
    points: tuple[Point, ...]
    dots: bool = False


@dataclass(frozen=True)
class _Frame:
    """The map from data to the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def line_chart(title: str, series: Sequence[Series]) -> str:
    """Draw curves over one pair of axes. A single point is drawn as a dot."""
    drawn = [Series(s.name, thin(s.points), s.dots) for s in series if s.points]
    frame = _frame([p for s in drawn for p in s.points])
    marks = "".join(_curve(frame, s, colour(i)) for i, s in enumerate(drawn))
    return _svg(title, _axes(frame) + marks)


def stacked_chart(title: str, series: Sequence[Series]) -> str:
    """Draw areas on top of each other; every series must have the same x values."""
    drawn = [Series(s.name, thin(s.points)) for s in series if s.points]
    xs = [x for x, _ in drawn[0].points]
    floor = [0.0] * len(xs)
    layers: list[tuple[list[float], list[float]]] = []
    for s in drawn:
        ceiling = [low + max(0.0, y) for low, (_, y) in zip(floor, s.points, strict=True)]
        layers.append((floor, ceiling))
        floor = ceiling
    frame = _frame([(x, 0.0) for x in xs] + list(zip(xs, floor, strict=True)))
    marks = "".join(_area(frame, xs, low, high, colour(i)) for i, (low, high) in enumerate(layers))
    return _svg(title, _axes(frame) + marks)


def colour(index: int) -> str:
    """Return the CSS colour of the curve at ``index``."""
    return f"var(--s{index % COLOURS + 1})"


def thin(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return at most ``MAX_POINTS`` points: equal runs of neighbours become their means."""
    if len(points) <= MAX_POINTS:
        return tuple(points)
    size = math.ceil(len(points) / MAX_POINTS)
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return tuple((sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs)


def running_mean(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the mean over a centred window of a tenth of the curve, shorter at the ends."""
    half = max(1, len(points) // 20)
    windows = [points[max(0, i - half) : i + half + 1] for i in range(len(points))]
    return tuple((x, sum(y for _, y in w) / len(w)) for (x, _), w in zip(points, windows, strict=True))


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten apart) between ``low`` and ``high``."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def format_number(value: float) -> str:
    """Return three significant digits, thousands as k and M: ``0.0123``, ``12.3k``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _frame(points: Sequence[Point]) -> _Frame:
    """Draw axes around the points, a little wider; a flat or single-point curve gets room around it."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_low, x_high, y_low, y_high = min(xs), max(xs), min(ys), max(ys)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    if y_high - y_low <= 1e-9 * max(abs(y_low), abs(y_high)):
        room = abs(y_high) * 0.5 or 1.0
        y_low, y_high = y_low - (0.0 if y_low == 0 else room), y_high + room
    margin = 0.05 * (y_high - y_low)
    return _Frame(x_low, x_high, y_low if y_low == 0 else y_low - margin, y_high + margin)


def _axes(frame: _Frame) -> str:
    parts = []
    for value in ticks(frame.y_low, frame.y_high):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{format_number(value)}</text>'
        )
    for value in ticks(frame.x_low, frame.x_high, 6):
        if value == int(value):
            x = frame.x(value)
            parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{int(value)}</text>')
    return "".join(parts)


def _curve(frame: _Frame, series: Series, stroke: str) -> str:
    points = series.points
    parts = []
    if len(points) >= SMOOTH_FROM and not series.dots:
        parts.append(_polyline(frame, points, stroke, "raw"))
        parts.append(_polyline(frame, running_mean(points), stroke, "line"))
    else:
        parts.append(_polyline(frame, points, stroke, "line"))
    visible = series.dots or len(points) == 1
    look = 'r="3"' if visible else 'r="5" opacity="0"'  # an unseen dot still shows its title under the pointer
    for x, y in points:
        label = f"{series.name}, step {format_number(x)}: {format_number(y)}"
        parts.append(
            f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" {look} fill="{stroke}">'
            f"<title>{escape(label)}</title></circle>"
        )
    return "".join(parts)


def _polyline(frame: _Frame, points: Sequence[Point], stroke: str, kind: str) -> str:
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{path}" stroke="{stroke}"/>'


def _area(frame: _Frame, xs: Sequence[float], low: Sequence[float], high: Sequence[float], fill: str) -> str:
    if len(xs) == 1:  # one step: a bar instead of an area without width
        top, height = frame.y(high[0]), frame.y(low[0]) - frame.y(high[0])
        return f'<rect x="{frame.x(xs[0]) - 20:.1f}" y="{top:.1f}" width="40" height="{height:.1f}" fill="{fill}"/>'
    upper = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, high, strict=True)]
    lower = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, low, strict=True)]
    return f'<polygon class="area" points="{" ".join(upper + lower[::-1])}" fill="{fill}"/>'


def _svg(title: str, content: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{content}</svg>'
