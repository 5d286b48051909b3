"""The closing page of a run: ``report.html``, self-contained, readable without a network and without scripts."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html import escape
from itertools import dropwhile
from pathlib import Path
from typing import Any

import yaml

from tandem.base.run_folder import REPORT_FILE
from tandem.observe.chart import Series, colour, format_number, line_chart, stacked_chart
from tandem.observe.metrics import METRICS_FILE, ROLLOUTS_FILE, Row, read_rows, to_json
from tandem.observe.page import PAGE
from tandem.observe.progress import SHARES, format_seconds

EDGE_STEPS = 10
"""Steps at each end whose mean reward is compared in the head of the page."""
SAMPLES_SHOWN = 8

Curves = dict[str, list[tuple[float, float]]]

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""That of libyaml where PyYAML has it: writing a config takes the other one as long as all else of the page."""


@dataclass(frozen=True)
class Panel:
    """A chart of all metrics whose key matches one of ``patterns``, in the order of the patterns.

    Those that are ``flat`` throughout are left out.
    """

    title: str
    unit: str
    patterns: tuple[str, ...]
    flat: float | None = None


PANELS = (
    Panel("Reward", "per sample", ("reward/mean", "eval/reward", "eval/accuracy", "eval/mean@*", "eval/pass@*")),
    Panel("Answers scored", "share; the others are in no mean", SHARES, flat=1.0),
    Panel("KL to the reference", "nats per token", ("kl/mean",)),
    Panel("Response length", "tokens", ("length/mean", "length/max", "eval/length*")),
    Panel("Turns of an episode", "", ("episode/turns", "episode/tool_calls", "eval/episode/turns")),
    Panel("Lag", "versions between generation and training", ("lag/mean", "lag/max")),
    Panel("Entropy", "nats per token", ("entropy/mean",)),
    Panel("Loss", "", ("loss/*",)),
    Panel("Gradient norm", "", ("grad/norm",)),
    Panel("Fraction of the best possible step", "1 is all of it", ("limit/fraction",)),
    Panel("Memory", "MB", ("system/memory_mb", "system/memory_left_mb", "system/gpu_memory_mb")),
    Panel("Throughput", "response tokens per second", ("throughput/*",)),
    Panel("Loads of experts", "1 is an even share", ("moe/load_max", "moe/load_max_mean", "moe/balance")),
    Panel("Rollout against trainer", "log-probs of the same tokens", ("mismatch/*",)),
)


def write_report(output_dir: Path, *, config: Mapping[str, object], summary: Mapping[str, object]) -> Path:
    """Write ``output_dir/report.html`` from ``metrics.jsonl`` and ``rollouts.jsonl`` there; its path.

    Works with what there is: a run without metrics gives a page that says so. ``summary`` values are shown as they are.
    """
    curves = read_curves(read_rows(output_dir / METRICS_FILE))
    page = PAGE.format(
        title=escape(output_dir.resolve().name),
        tiles="".join(_tile(label, value) for label, value in headline(curves)),
        summary=_facts(summary),
        charts=_charts(curves) or '<p class="empty">No step was logged.</p>',
        samples=_samples(read_rows(output_dir / ROLLOUTS_FILE)),
        metrics=_metric_table(curves),
        config=escape(_as_yaml(to_json(config))) if config else "",
    )
    path = output_dir / REPORT_FILE
    beside = path.with_name(REPORT_FILE + ".partial")
    beside.write_text(page, encoding="utf-8", errors="replace")
    os.replace(beside, path)
    return path


def _as_yaml(tree: object) -> str:
    return str(yaml.dump(tree, Dumper=_DUMPER, sort_keys=False, allow_unicode=True))


def read_curves(rows: Sequence[Row]) -> Curves:
    """Return (step, value) per numeric key, in step order; of several values for one step the last counts."""
    by_key: defaultdict[str, dict[float, float]] = defaultdict(dict)
    for row in rows:
        step = row.get("step")
        if not _is_number(step):
            continue
        for key, value in row.items():
            if key != "step" and _is_number(value):
                by_key[key][float(step)] = float(value)  # type: ignore[arg-type]
    return {key: sorted(values.items()) for key, values in by_key.items()}


def headline(curves: Curves) -> list[tuple[str, str]]:
    """Return what the run came to, in a few (label, value) pairs; pairs without data are left out."""
    tiles: list[tuple[str, str]] = []
    if reward := [y for _, y in curves.get("reward/mean", [])]:
        edge = min(EDGE_STEPS, max(1, len(reward) // 2))
        first, last = _mean(reward[:edge]), _mean(reward[-edge:])
        if len(reward) == 1:
            tiles.append(("reward", f"{last:.3f}"))
        else:
            steps_text = "step" if edge == 1 else f"{edge} steps"
            tiles.append((f"reward, first → last {steps_text}", f"{first:.3f} → {last:.3f}"))
        if (shares := [y for _, y in curves.get(SHARES[0], [])]) and min(shares) < 1:
            tiles.append(("answers scored", f"{_mean(shares):.0%}"))
    for key, label in (("eval/reward", "evaluation reward"), ("eval/accuracy", "evaluation accuracy")):
        if evaluation := [y for _, y in curves.get(key, [])]:
            start = f"{evaluation[0]:.3f} → " if len(evaluation) > 1 else ""
            tiles.append((label, f"{start}{evaluation[-1]:.3f}"))
    steps = {x for points in curves.values() for x, _ in points if x > 0}
    if steps:
        tiles.append(("steps", f"{len(steps)}"))
    if updates := curves.get("updates"):
        tiles.append(("optimizer steps", f"{updates[-1][1]:.0f}"))
    whole = ["time/step"] if "time/step" in curves else [key for key, _ in _time_parts(curves)]
    seconds = sum(y for key in whole for _, y in curves[key])
    if seconds:
        tiles.append(("time in steps", format_seconds(seconds)))
    return tiles


def _charts(curves: Curves) -> str:
    figures = []
    for panel in PANELS:
        keys = [key for key in _matching(panel.patterns, curves) if {y for _, y in curves[key]} != {panel.flat}]
        if keys:
            series = [Series(key, tuple(curves[key]), dots=key.startswith("eval/")) for key in keys]
            legend = [(key, format_number(curves[key][-1][1])) for key in keys]
            figures.append(_figure(panel.title, panel.unit, line_chart(panel.title, series), legend))
    parts = _time_parts(curves)
    if parts:
        steps = sorted({x for key, _ in parts for x, _ in curves[key]})
        filled = [(label, dict(curves[key])) for key, label in parts]
        stack = [Series(label, tuple((x, values.get(x, 0.0)) for x in steps)) for label, values in filled]
        shares = [(s.name, sum(y for _, y in s.points)) for s in stack]
        total = sum(seconds for _, seconds in shares) or 1.0
        legend = [(name, f"{seconds / total:.0%}") for name, seconds in shares]
        figures.append(_figure("Where the time goes", "seconds per step", stacked_chart("Time", stack), legend))
    return "".join(figures)


def _time_parts(curves: Curves) -> list[tuple[str, str]]:
    """Return (key, label) of the parts of a step that follow each other: those of the loop's own thread.

    They have processor seconds beside them; what has none went on beside the loop, or lies inside another part.
    ``time/step`` is their sum and not one of them, unless it is alone.
    """
    keys = [key for key in curves if key.startswith("time/")]
    own = [key for key in keys if f"cpu/{key.removeprefix('time/')}" in curves] or keys
    parts = [key for key in own if key != "time/step"] or own
    return [(key, key.removeprefix("time/")) for key in parts]


def _matching(patterns: Sequence[str], curves: Curves) -> list[str]:
    found = [key for pattern in patterns for key in curves if fnmatchcase(key, pattern)]
    return list(dict.fromkeys(found))


def _figure(title: str, unit: str, svg: str, legend: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<li><i style="background:{colour(i)}"></i>{escape(name)} <b>{escape(value)}</b></li>'
        for i, (name, value) in enumerate(legend)
    )
    head = f"<h2>{escape(title)} <small>{escape(unit)}</small></h2>"
    return f"<figure>{head}{svg}<ul>{items}</ul></figure>"


def _tile(label: str, value: str) -> str:
    return f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>"


PNG_URL = "data:image/png;base64,"
"""How an image that is shown begins; nothing else is put into the page as one."""


def _facts(summary: Mapping[str, object]) -> str:
    rows = "".join(
        f"<tr><th>{escape(str(key).replace('_', ' '))}</th><td>{escape(str(to_json(value)))}</td></tr>"
        for key, value in summary.items()
    )
    return f'<table class="facts">{rows}</table>' if rows else ""


def _samples(rows: Sequence[Row]) -> str:
    """Return the samples of the first and of the last step that has any."""
    numbered = [row for row in rows if _is_number(row.get("step"))]
    if not numbered:
        return ""
    edges = list(dict.fromkeys([numbered[0]["step"], numbered[-1]["step"]]))
    shown = [row for step in edges for row in [r for r in numbered if r["step"] == step][: SAMPLES_SHOWN // 2]]
    cells = ("step", "prompt", "response", "ground_truth", "reward")
    head = "<tr>" + "".join(f"<th>{name.replace('_', ' ')}</th>" for name in cells) + "</tr>"
    body = "".join(
        "<tr>"
        + "".join(f"<td>{_images(row) if name == 'prompt' else ''}{_cell(_value(row, name))}</td>" for name in cells)
        + "</tr>"
        for row in shown
    )
    return f'<section><h2>Samples</h2><div class="wide"><table>{head}{body}</table></div></section>'


def _images(row: Row) -> str:
    """Return what the prompt of a sample shows."""
    urls = row.get("images")
    given = [str(url) for url in urls] if isinstance(urls, list) else []
    return "".join(f'<img alt="" src="{escape(url)}">' for url in given if url.startswith(PNG_URL))


def _value(row: Row, name: str) -> object:
    """Return what a column shows of a sample. The response of an episode is what was said, turn by turn, with what each
    turn was worth.
    """
    messages = row.get("messages")
    if name != "response" or not isinstance(messages, list):
        return row.get(name)
    said = list(dropwhile(lambda message: message["role"] != "assistant", messages))
    rewards = iter(row.get("turn_rewards") or ())  # type: ignore[call-overload]
    worth = [f" ({next(rewards, 0):+g})" if row.get("turn_rewards") and _sampled(one) else "" for one in said]
    return "\n".join(f"{one['role']}{more}: {_said(one)}" for one, more in zip(said, worth, strict=True))


def _sampled(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "assistant")


def _said(message: Mapping[str, Any]) -> str:
    """Return the text of a message, and the calls of tools in it."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
    return " ".join([str(message["content"]), *texts] if message["content"] else texts)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if _is_number(value):
        return format_number(float(value))  # type: ignore[arg-type]
    return f"<pre>{escape(str(value))}</pre>"


def _metric_table(curves: Curves) -> str:
    rows = []
    for key in sorted(curves):
        ys = [y for _, y in curves[key]]
        cells = "".join(f"<td>{format_number(y)}</td>" for y in (ys[0], min(ys), max(ys), ys[-1]))
        rows.append(f"<tr><th>{escape(key)}</th>{cells}</tr>")
    return "<tr><th></th><th>first</th><th>least</th><th>most</th><th>last</th></tr>" + "".join(rows) if rows else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
