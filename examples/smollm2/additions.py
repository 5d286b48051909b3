"""One-digit addition: 100 sums, 25 of them held out of the training."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tandem import BaseDataSource

Row = dict[str, int]
SHOWN = {(1, 2), (4, 4)}
"""The sums that the few-shot prompt answers: no question for the evaluation."""


def as_row(pair: tuple[int, int]) -> Row:
    """Columns for the config's template: summands and ``answer``."""
    x, y = pair
    return {"x": x, "y": y, "answer": x + y}


class Additions(BaseDataSource):
    """All sums of two digits."""

    def __init__(self) -> None:
        pairs = [(x, y) for x in range(10) for y in range(10)]
        self.held_out = random.Random(10).sample([pair for pair in pairs if pair not in SHOWN], 25)
        self.train = [pair for pair in pairs if pair not in self.held_out]

    def get_train_dataset(self) -> Sequence[Row]:
        """The sums to train on."""
        return [as_row(pair) for pair in self.train]

    def get_val_dataset(self) -> Sequence[Row]:
        """The held-out sums."""
        return [as_row(pair) for pair in self.held_out]
