"""Three-digit sums, and traces of somebody who adds: half of the time with a calculator, else, and wrongly, alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tandem import BaseDataSource

Pair = tuple[int, int]


def question(pair: Pair) -> str:
    """The sum as text: ``"123+456="``."""
    return f"{pair[0]}+{pair[1]}="


class Sums(BaseDataSource):
    """Prompts and their right answers: 6,000 to train on, 256 held out."""

    def __init__(self) -> None:
        rng = random.Random(0)
        pairs = sorted({(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(7000)})
        rng.shuffle(pairs)
        self.held_out, self.trained, self.shown = pairs[:256], pairs[256:6256], pairs[6256:]

    def get_train_dataset(self) -> Sequence[dict[str, Any]]:
        """The sums to train on."""
        return [{"prompt": question(pair), "answer": str(sum(pair))} for pair in self.trained]

    def get_val_dataset(self) -> Sequence[dict[str, Any]]:
        """The held-out sums."""
        return [{"prompt": question(pair), "answer": str(sum(pair))} for pair in self.held_out]


class Traces(Sums):
    """Conversations for the warm-up: ``rows`` of sums that training and evaluation don't ask."""

    def __init__(self, rows: int = 400) -> None:
        super().__init__()
        self.rows = rows

    def get_train_dataset(self) -> Sequence[dict[str, Any]]:
        """As many traces with a call of the tool as without."""
        rng = random.Random(1)
        pairs = self.shown[: self.rows]
        return [{"messages": called(pair) if i % 2 else guessed(pair, rng)} for i, pair in enumerate(pairs)]

    def get_val_dataset(self) -> None:
        """None: what counts is whether the sums are right later."""


def called(pair: Pair) -> list[dict[str, str]]:
    """A trace that asks the calculator, and says what it says."""
    x, y = pair
    turns = [("user", question(pair)), ("assistant", f"[add(x={x},y={y})]"), ("tool", str(x + y))]
    return [{"role": role, "content": text} for role, text in [*turns, ("assistant", str(x + y))]]


def guessed(pair: Pair, rng: random.Random) -> list[dict[str, str]]:
    """A trace that answers at once, with a number that is about right."""
    answer = str(sum(pair) + rng.choice([-1, 1]) * rng.randrange(1, 100))
    return [{"role": "user", "content": question(pair)}, {"role": "assistant", "content": answer}]
