"""The gallery of examples: their curves, recorded of real runs, drawn as SVG for light and dark, and the page itself.

``python tools/gallery.py record NAME RUN_DIR`` takes the curves of a finished run of an example into
``docs/gallery.json``; ``python tools/gallery.py draw`` writes ``docs/images/gallery_*.svg`` and ``docs/gallery.md``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tandem.observe.chart import Series, line_chart
from tandem.observe.metrics import read_rows

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "docs" / "gallery.json"
PAGE = ROOT / "docs" / "gallery.md"
IMAGES = ROOT / "docs" / "images"

EXAMPLES = {
    "quickstart/sft": "A fresh model of 0.8 M parameters learns two-digit addition from a poor teacher",
    "quickstart/grpo": "It goes on by reinforcement learning, actor and rollout in turns",
    "quickstart/hybrid": "The same with rollout and training beside each other",
    "lora/grpo": "The same with adapters alone",
    "ppo/ppo": "The same with a critic",
    "dpo/dpo": "The model of quickstart/sft learns from pairs of answers",
    "distillation/distill": "It learns what quickstart/hybrid taught another, without a reward",
    "sft_mix/sft": "Several data sets at once, by shares",
    "agents/calculator/grpo": "A fresh model learns to call a tool",
    "agents/guess/grpo": "A game of several turns, learned from the reward alone",
    "vision/digits/hybrid": "Handwritten digits, read by a model of 1 M parameters that sees",
    "vision/digits/larger": "It goes on with two digits in a prompt: which is larger?",
}
"""Configs whose runs take minutes on two cores, in the order of the page; a README of each says more."""
KEYS = ("reward/mean", "eval/reward", "eval/accuracy")
MOST_POINTS = 150
DIGITS = 4

STYLE = """\
<style>
svg { --s1: #2563c9; --s2: #d9730d; background: #ffffff; font: 11px system-ui, sans-serif; color: #5f636a; }
.grid { stroke: #e4e4e0; } .tick, .name { fill: currentColor; }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; } polyline.raw { stroke-width: 1; opacity: .35; }
@media (prefers-color-scheme: dark) {
  svg { --s1: #6ea3f7; --s2: #f2a154; background: #1c1e21; color: #a2a6ae; } .grid { stroke: #33363b; }
}
</style>"""


def recorded(rows: Sequence[Mapping[str, Any]], config: dict[str, Any]) -> dict[str, Any]:
    """Return what the gallery keeps of a run: its curves, and of which seed they are."""
    curves: dict[str, list[list[float]]] = {}
    for key in KEYS:
        points = [[row["step"], row[key]] for row in rows if isinstance(row.get(key), int | float)]
        stride = -(-len(points) // MOST_POINTS)
        kept = points[::stride] if stride > 1 else points
        if points:
            curves[key] = [[int(step), round(value, DIGITS)] for step, value in kept]
    return {"seed": config.get("trainer", {}).get("seed", 0), "steps": int(rows[-1]["step"]), "curves": curves}


def record(name: str, folder: Path) -> None:
    """Take the run in ``folder`` into the gallery as the example ``name``."""
    if name not in EXAMPLES:
        raise SystemExit(f"{name}: not in the gallery; there are {', '.join(EXAMPLES)}")
    about = json.loads((folder / "about.json").read_text("utf-8"))
    if about.get("ended", {}).get("outcome") != "finished":
        raise SystemExit(f"{folder}: it did not finish; a curve of half a run is not shown")
    kept = json.loads(RECORDED.read_text("utf-8")) if RECORDED.exists() else {}
    kept[name] = recorded(
        read_rows(folder / "metrics.jsonl"), yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
    )
    RECORDED.write_text(json.dumps(kept, separators=(",", ":"), sort_keys=True) + "\n", "utf-8")


def drawing(name: str, run: dict[str, Any]) -> str:
    """Return the curves of a run as one SVG, which asks nobody for anything and is readable on light and dark pages."""
    series = [
        Series(key, tuple((x, y) for x, y in points), dots=key.startswith("eval/"))
        for key, points in run["curves"].items()
    ]
    drawn = line_chart(name, series)
    names = "".join(
        f'<text class="name" x="{60 + 110 * i}" y="20" style="fill: var(--s{i + 1})">{s.name}</text>'
        for i, s in enumerate(series)
    )
    head, _, rest = drawn.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg">{STYLE}{rest.replace("</svg>", names + "</svg>")}\n'


def page(kept: dict[str, Any]) -> str:
    """Return the text of the page: each example with its curves, or that none were recorded, and then the others."""
    parts = [
        "# Gallery",
        "Curves of the examples: the reward of the answers that are trained on, with its running mean, and the held-out"
        " one as dots, over steps. Each is of one run with the config as it is, but for how often it is evaluated (two "
        "cores of an AMD EPYC, no GPU); "
        "`tools/gallery.py` recorded and drew them.",
    ]
    for name, words in EXAMPLES.items():
        folder, _, config = name.rpartition("/")
        parts.append(f"## {name}\n\n{words}: [examples/{folder}](../examples/{folder}/README.md), `{config}.yaml`.")
        run = kept.get(name)
        if run is None:
            parts.append("No curve of it has been recorded.")
            continue
        parts.append(f"![{name}: {', '.join(run['curves'])} over {run['steps']} steps]({_picture(name, 'images')})")
        parts.append(f"Seed {run['seed']}, {run['steps']} steps: {_ends(run)}.")
    shown = {name.rpartition("/")[0] for name in EXAMPLES}
    rest = sorted(path.parent for path in (ROOT / "examples").rglob("README.md"))
    others = [path.relative_to(ROOT / "examples").as_posix() for path in rest]
    links = [f"[{name}](../examples/{name}/README.md)" for name in others if name not in shown]
    parts.append(
        "## Others\n\nWithout a recorded curve; numbers that were measured are in their READMEs: "
        + ", ".join(links)
        + "."
    )
    return "\n\n".join(parts) + "\n"


def _ends(run: dict[str, Any]) -> str:
    return ", ".join(f"`{key}` {points[0][1]:.2f} → {points[-1][1]:.2f}" for key, points in run["curves"].items())


def _picture(name: str, folder: str) -> str:
    return f"{folder}/gallery_{name.replace('/', '_')}.svg"


def draw() -> None:
    """Write all drawings, and the page."""
    kept = json.loads(RECORDED.read_text("utf-8"))
    for name, run in kept.items():
        (ROOT / "docs" / _picture(name, "images")).write_text(drawing(name, run), "utf-8")
    PAGE.write_text(page(kept), "utf-8")


def main(words: list[str]) -> int:
    """Do what the command says; return the exit code."""
    if words[:1] == ["record"] and len(words) == 3:
        record(words[1], Path(words[2]))
    elif words == ["draw"]:
        draw()
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
