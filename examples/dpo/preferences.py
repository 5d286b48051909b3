"""Preferences on two-digit addition: the right sum is better than one with a wrong digit. 512 sums are held out."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tandem import BaseDataSource

Row = dict[str, str]


class WrongDigits(BaseDataSource):
    """A right and a spoiled answer to ``rows`` draws of the quickstart's training sums; and to its held-out ones."""

    def __init__(self, rows: int = 6_400, seed: int = 0) -> None:
        pairs = [(x, y) for x in range(100) for y in range(100)]
        held_out = set(random.Random(10_000).sample(pairs, 512))
        self.train_pairs = [pair for pair in pairs if pair not in held_out]
        self.held_out_pairs = sorted(held_out)
        self.rows, self.seed = rows, seed

    def get_train_dataset(self) -> Sequence[Row]:
        """Draws of training sums."""
        rng = random.Random(self.seed)
        return [self.row(rng.choice(self.train_pairs), rng) for _ in range(self.rows)]

    def get_val_dataset(self) -> Sequence[Row]:
        """The held-out sums."""
        rng = random.Random(self.seed)
        return [self.row(pair, rng) for pair in self.held_out_pairs]

    @staticmethod
    def row(pair: tuple[int, int], rng: random.Random) -> Row:
        """``" 3+45="`` with ``"48"`` and, say, ``"43"``."""
        x, y = pair
        right = str(x + y)
        place = rng.randrange(len(right))
        digit = rng.choice([digit for digit in "0123456789" if digit != right[place]])
        return {"prompt": f"{x:2d}+{y:2d}=", "chosen": right, "rejected": right[:place] + digit + right[place + 1 :]}
