"""Real handwritten digits, 8 × 8 pixels each, that come with scikit-learn: 1,797, of which 297 are held out."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import Any

from PIL import Image
from sklearn.datasets import load_digits

from tandem import BaseDataSource

Row = dict[str, Any]
HELD_OUT = 297


class Digits(BaseDataSource):
    """Images and their right answers; ``rows`` trains on the first ones alone."""

    def __init__(self, rows: int | None = None) -> None:
        found = load_digits()
        order = list(range(len(found.target)))
        random.Random(0).shuffle(order)
        every = [as_row(found.images[i], int(found.target[i])) for i in order]
        self.held_out, self.train = every[:HELD_OUT], every[HELD_OUT:][:rows]

    def get_train_dataset(self) -> Sequence[Row]:
        """All digits but those held out."""
        return self.train

    def get_val_dataset(self) -> Sequence[Row]:
        """The held-out digits."""
        return self.held_out


class DigitsWithErrors(Digits):
    """A poor teacher for the warm-up: half of its answers are random digits."""

    def __init__(self, copies: int = 8, seed: int = 0) -> None:
        super().__init__()
        self.copies, self.seed = copies, seed

    def get_train_dataset(self) -> Sequence[Row]:
        """Each digit ``copies`` times, as the poor teacher answers it."""
        rng = random.Random(self.seed)
        return [self.answered(row, rng) for _ in range(self.copies) for row in self.train]

    def get_val_dataset(self) -> Sequence[Row]:
        """The held-out digits, answered rightly."""
        return [{**row, "response": row["answer"]} for row in self.held_out]

    @staticmethod
    def answered(row: Row, rng: random.Random) -> Row:
        """The row with the teacher's answer."""
        return {**row, "response": row["answer"] if rng.random() < 0.5 else rng.choice("0123456789")}


class Larger(Digits):
    """Two images in a prompt: which digit is the larger one? ``pairs`` to train on, of the digits that are trained on;
    the held-out pairs are of those held out.
    """

    def __init__(self, pairs: int = 3000, held_out: int = 297) -> None:
        super().__init__()
        self.train = pairs_of(self.train, pairs, seed=0)
        self.held_out = pairs_of(self.held_out, held_out, seed=1)


def pairs_of(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """Questions about two images of different digits, drawn from ``rows``."""
    rng = random.Random(seed)
    found: list[Row] = []
    while len(found) < count:
        one, other = rng.sample(rows, 2)
        if one["answer"] != other["answer"]:
            images, answer = one["images"] + other["images"], max(one["answer"], other["answer"])
            found.append({"prompt": "<image><image>larger?", "images": images, "answer": answer})
    return found


def as_row(pixels: Any, digit: int) -> Row:
    """A question about one image, of 8 × 8 numbers from 0 to 16."""
    written = io.BytesIO()
    Image.fromarray((pixels * 15.9).astype("uint8")).save(written, "PNG")
    return {"prompt": "<image>digit?", "images": [written.getvalue()], "answer": str(digit)}
