"""Questions about drawn figures, in rows of a problem, its solution and an image."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw

from tandem import BaseDataSource

Row = dict[str, Any]
ASKED = "Find the {what} of the figure. Its sides are {a} and {b}{right}. Write the number behind 'Answer:'."


class Geometry(BaseDataSource):
    """``rows`` figures to train on and ``held_out`` others, always the same; none of the second is among the first.

    ``side``: width and height of an image in pixels.
    """

    def __init__(self, rows: int = 1024, held_out: int = 64, side: int = 224) -> None:
        self.every = figures(side)
        random.Random(0).shuffle(self.every)
        self.rows, self.held_out = rows, held_out

    def get_train_dataset(self) -> Sequence[Row]:
        """The figures to train on."""
        return [question(*figure) for figure in self.every[self.held_out :][: self.rows]]

    def get_val_dataset(self) -> Sequence[Row]:
        """The held-out figures."""
        return [question(*figure) for figure in self.every[: self.held_out]]


Figure = tuple[str, int, int, int]


def figures(side: int) -> list[Figure]:
    """All figures: what is asked, the two sides, and the pixels of the image."""
    asked = ("area of a rectangle", "perimeter of a rectangle", "area of a triangle")
    sides = [(a, b) for a in range(2, 22) for b in range(2, 22)]
    return [(what, a, b, side) for what in asked for a, b in sides if what != asked[2] or a * b % 2 == 0]


def question(what: str, a: int, b: int, side: int) -> Row:
    """The row of one figure, in the form that the ``datasets`` package writes images."""
    triangle = what.endswith("triangle")
    solution = 2 * (a + b) if what.startswith("perimeter") else a * b // (1 + triangle)
    written = io.BytesIO()
    drawn(a, b, side, triangle).save(written, "PNG")
    right = ", with a right angle between them" if triangle else ""
    return {
        "problem": "<image>" + ASKED.format(what=what.split()[0], a=a, b=b, right=right),
        "solution": str(solution),
        "image": {"bytes": written.getvalue(), "path": None},
    }


def drawn(a: int, b: int, side: int, triangle: bool) -> Image.Image:
    """A rectangle or a right triangle of width ``a`` and height ``b``, as large as the image lets it be."""
    image, scale, edge = Image.new("RGB", (side, side), "white"), 0.8 * side / max(a, b), 0.1 * side
    right, low = edge + a * scale, edge + b * scale
    corners = [(edge, edge), (edge, low), (right, low)] + ([] if triangle else [(right, edge)])
    ImageDraw.Draw(image).polygon(corners, fill="lightblue", outline="black")
    return image
