"""Three-digit sums, some held out of all training, and traces of a teacher who takes the tool half of the time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tandem import BaseDataSource

Row = dict[str, Any]
Pair = tuple[int, int]


def draw(rng: random.Random) -> Pair:
    """Two numbers of three digits."""
    return rng.randrange(100, 1000), rng.randrange(100, 1000)


class Sums(BaseDataSource):
    """Questions and their right answers."""

    def __init__(self) -> None:
        rng = random.Random(1)
        self.held_out_pairs = sorted({draw(rng) for _ in range(256)})
        self.train_pairs = sorted({draw(rng) for _ in range(4000)} - set(self.held_out_pairs))

    def get_train_dataset(self) -> Sequence[Row]:
        """The sums to learn from."""
        return [{"prompt": f"{x}+{y}", "answer": str(x + y)} for x, y in self.train_pairs]

    def get_val_dataset(self) -> Sequence[Row]:
        """The held-out sums."""
        return [{"prompt": f"{x}+{y}", "answer": str(x + y)} for x, y in self.held_out_pairs]


class Traces(Sums):
    """Conversations: in one half the tool is called and its result repeated, in the other a wrong answer is guessed."""

    def get_train_dataset(self) -> Sequence[Row]:
        """One trace for each sum."""
        rng = random.Random(2)
        return [{"messages": self.trace(pair, rng)} for pair in self.train_pairs]

    def get_val_dataset(self) -> None:
        """Nothing is held out of the warm-up: the run after it is what counts."""

    @staticmethod
    def trace(pair: Pair, rng: random.Random) -> list[Row]:
        """The messages of one trace."""
        x, y = pair
        asked = {"role": "user", "content": f"{x}+{y}"}
        if rng.random() < 0.5:
            return [asked, {"role": "assistant", "content": str(rng.randrange(200, 1999))}]
        return [
            asked,
            {"role": "assistant", "content": f"[add(x={x},y={y})]"},
            {"role": "tool", "content": str(x + y)},
            {"role": "assistant", "content": str(x + y)},
        ]
