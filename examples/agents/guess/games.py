"""The numbers to be guessed, and games of somebody who guesses at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tandem import BaseDataSource

HIGHEST = 7


class Numbers(BaseDataSource):
    """One row for each number from 1 to ``HIGHEST``. The prompt doesn't tell it."""

    def get_train_dataset(self) -> Sequence[dict[str, Any]]:
        """All numbers."""
        return [{"prompt": "?", "answer": number} for number in range(1, HIGHEST + 1)]


class RandomGames(BaseDataSource):
    """Conversations for the warm-up, which show how one plays and nothing of how one plays well."""

    def __init__(self, rows: int = 400, turns: int = 8) -> None:
        self.rows, self.turns = rows, turns

    def get_train_dataset(self) -> Sequence[dict[str, Any]]:
        """``rows`` games: guesses come at random whatever the hints say."""
        rng = random.Random(0)
        return [{"messages": self.game(rng)} for _ in range(self.rows)]

    def game(self, rng: random.Random) -> list[dict[str, str]]:
        """One game of ``turns`` wrong guesses."""
        number = rng.randint(1, HIGHEST)
        others = [guess for guess in range(1, HIGHEST + 1) if guess != number]
        messages = [{"role": "user", "content": "?"}]
        for _ in range(self.turns):
            guess = rng.choice(others)
            messages.append({"role": "assistant", "content": str(guess)})
            messages.append({"role": "user", "content": ">" if guess < number else "<"})
        return messages[:-1]
