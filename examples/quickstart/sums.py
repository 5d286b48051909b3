"""Two-digit addition, the quickstart's task: 10,000 sums, 512 of them held out of all training."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tandem import BaseDataSource

Row = dict[str, str]


def as_row(pair: tuple[int, int]) -> Row:
    """The sum as text: ``" 3+45="``, ``"48"``."""
    x, y = pair
    return {"prompt": f"{x:2d}+{y:2d}=", "answer": str(x + y)}


class Sums(BaseDataSource):
    """Prompts and their right answers."""

    def __init__(self) -> None:
        pairs = [(x, y) for x in range(100) for y in range(100)]
        held_out = set(random.Random(10_000).sample(pairs, 512))
        self.train_pairs = [pair for pair in pairs if pair not in held_out]
        self.held_out_pairs = sorted(held_out)

    def get_train_dataset(self) -> Sequence[Row]:
        """All sums but those held out."""
        return [as_row(pair) for pair in self.train_pairs]

    def get_val_dataset(self) -> Sequence[Row]:
        """The held-out sums."""
        return [as_row(pair) for pair in self.held_out_pairs]


class SumsWithErrors(Sums):
    """A poor teacher for the warm-up: in half of the answers one digit is replaced by a random one."""

    def __init__(self, rows: int = 96_000, seed: int = 0) -> None:
        super().__init__()
        self.rows, self.seed = rows, seed

    def get_train_dataset(self) -> Sequence[Row]:
        """``rows`` draws of training sums."""
        rng = random.Random(self.seed)
        return [self.spoiled(as_row(rng.choice(self.train_pairs)), rng) for _ in range(self.rows)]

    def get_val_dataset(self) -> Sequence[Row]:
        """The held-out sums, answered rightly."""
        return [{"prompt": row["prompt"], "response": row["answer"]} for row in super().get_val_dataset()]

    @staticmethod
    def spoiled(row: Row, rng: random.Random) -> Row:
        """The row as the poor teacher answers it."""
        answer = row["answer"]
        if rng.random() < 0.5:
            place = rng.randrange(len(answer))
            answer = answer[:place] + rng.choice("0123456789") + answer[place + 1 :]
        return {"prompt": row["prompt"], "response": answer}
