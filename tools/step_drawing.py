"""Draws one step of each mode: ``docs/images/step_MODE.svg``, which show in light and dark.

Run as ``python tools/step_drawing.py [FOLDER]``; a test checks that the pictures in ``docs`` are these.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
SVG = "http://www.w3.org/2000/svg"
UNIT, LEFT, ROW, TOP, GAP = 12, 230, 44, 34, 8
"""Pixels: a unit of time, the lanes' names, a lane, the head, between a lane's edge and its boxes."""

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.head { font-weight: 600 } .who { font-size: 11px; fill: #59636e }
.lane { fill: none; stroke: #d1d9e0 } .box { stroke-width: 1 }
.generate { fill: #ddf4ff; stroke: #54aeff } .score { fill: #fff8c5; stroke: #d4a72c }
.forward { fill: #dafbe1; stroke: #4ac26b } .train { fill: #ffebe9; stroke: #ff8182 }
.push { fill: #fbefff; stroke: #c297ff } .wait { fill: none; stroke: #818b98; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .who { fill: #9198a1 } .lane { stroke: #3d444d }
  .generate { fill: #121d2f; stroke: #388bfd } .score { fill: #272115; stroke: #bb8009 }
  .forward { fill: #12261e; stroke: #2ea043 } .train { fill: #25171c; stroke: #f85149 }
  .push { fill: #211936; stroke: #a371f7 }
}
"""


@dataclass(frozen=True)
class Box:
    """Something that a lane does: ``label`` from ``start`` for ``length`` units of time; ``kind`` is its colour."""

    kind: str
    start: float
    length: float
    label: str


@dataclass(frozen=True)
class Lane:
    """A process or thread, what it is in words, and what it does in a step."""

    name: str
    what: str
    boxes: tuple[Box, ...]


def _row(kind: str, start: float, *boxes: tuple[str, float]) -> tuple[Box, ...]:
    """Boxes of one kind, one behind the other."""
    found = []
    for label, length in boxes:
        found.append(Box(kind, start, length, label))
        start += length
    return tuple(found)


_FORWARDS = (("ref", 4.0), ("teacher", 6.0), ("old_logprobs", 9.0), ("values", 5.0))

STEPS: dict[str, tuple[str, tuple[Lane, ...]]] = {
    "colocate": (
        "colocate: actor and rollout take turns on the same devices",
        (
            Lane(
                "driver",
                "the loop",
                (
                    Box("generate", 0, 16, "generate k"),
                    *_row("forward", 18, *_FORWARDS, ("advantages", 8)),
                    *_row("train", 50, ("train_critic", 8), ("train", 9)),
                    Box("push", 67, 7, "push k+1"),
                ),
            ),
            Lane("scoring processes", "score as groups finish", (Box("score", 4, 14, "score k"),)),
        ),
    ),
    "hybrid": (
        "hybrid: generation goes on while the actor works; here with max_staleness 1 and two sub-batches",
        (
            Lane(
                "engine process",
                "one for each engine",
                _row("generate", 0, ("generate k", 22), ("generate k+1", 44), ("k+2", 9)),
            ),
            Lane(
                "rollout worker",
                "a thread: asks the gate, puts groups",
                _row("wait", 0, ("tickets of k", 22), ("tickets of k+1", 44), ("k+2", 9)),
            ),
            Lane("scoring processes", "", (Box("score", 6, 19, "score k"), Box("score", 30, 39, "score k+1"))),
            Lane(
                "driver",
                "the actor's loop",
                (
                    *_row("forward", 13, ("ref … values", 11), ("ref … values", 11), ("advantages", 8)),
                    *_row("train", 43, ("train_critic", 8), ("train", 9)),
                    Box("push", 60, 7, "push k+1"),
                ),
            ),
        ),
    ),
    "fully_async": (
        "fully_async: each role has weights and a loop of its own; columns stream between them",
        (
            Lane(
                "engine process",
                "one for each engine",
                _row("generate", 0, ("generate k", 20), ("generate k+1", 40), ("k+2", 15)),
            ),
            Lane("scoring processes", "", (Box("score", 5, 18, "score k"), Box("score", 27, 36, "score k+1"))),
            Lane("reference", "a thread, its own weights", _row("forward", 12, ("ref k", 16), ("ref k+1", 38))),
            Lane(
                "actor_fwd",
                "a thread, weights by broadcast",
                _row("forward", 12, ("old_logprobs k", 16), ("old_logprobs k+1", 38)),
            ),
            Lane("critic", "a thread", _row("forward", 12, ("values k", 16), ("values k+1", 38))),
            Lane("advantages", "a thread", (Box("forward", 29, 9, "advantages"),)),
            Lane(
                "driver",
                "the actor's loop",
                (*_row("train", 39, ("train_critic", 8), ("train", 10)), Box("push", 57, 7, "push k+1")),
            ),
        ),
    ),
}


def draw(mode: str) -> str:
    """The picture of a step of ``mode`` as SVG."""
    title, lanes = STEPS[mode]
    width = LEFT + UNIT * max(int(box.start + box.length) for lane in lanes for box in lane.boxes) + 2 * GAP
    height = TOP + ROW * len(lanes) + GAP
    parts = [
        f'<svg xmlns="{SVG}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<text class="head" x="{GAP}" y="20">{escape(title)}</text>',
    ]
    for index, lane in enumerate(lanes):
        top = TOP + index * ROW
        middle = top + ROW / 2
        parts.append(f'<path class="lane" d="M {GAP} {top} H {width - GAP}"/>')
        parts.append(f'<text x="{GAP}" y="{middle - 2}">{escape(lane.name)}</text>')
        parts.append(f'<text class="who" x="{GAP}" y="{middle + 13}">{escape(lane.what)}</text>')
        parts += [line for box in lane.boxes for line in _box(box, top)]
    return "\n".join([*parts, "</svg>", ""])


def _box(box: Box, top: int) -> list[str]:
    x, width = LEFT + box.start * UNIT, box.length * UNIT
    middle, height = x + width / 2, ROW - 2 * GAP
    return [
        f'<rect class="box {box.kind}" x="{x:g}" y="{top + GAP}" width="{width - 2:g}" height="{height}" rx="4"/>',
        f'<text x="{middle - 1:g}" y="{top + ROW / 2 + 4:g}" text-anchor="middle">{escape(box.label)}</text>',
    ]


def main() -> int:
    """Write the pictures; the exit code."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for mode in STEPS:
        (folder / f"step_{mode}.svg").write_text(draw(mode), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
