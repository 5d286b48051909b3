"""A game: guess a number, and be told whether it is higher or lower."""

from __future__ import annotations

from typing import Any


async def guess(task: Any, policy: Any, *, turns: int = 8) -> dict[str, float]:
    """Return the reward: 1 for the first guess, less for each further one, 0 for none of ``turns``."""
    number, messages = int(task.ground_truth), list(task.messages)
    unsolved = {"score": 0.0, "solved": 0.0, "guesses": float(turns)}
    policy.reward = unsolved  # also for a game that the limit of tokens ends
    for turn in range(turns):
        answer = await policy.chat(messages)
        said = answer.content.strip()
        guessed = int(said) if said.isdecimal() else 0
        if guessed == number:
            return {"score": 1 - turn / turns, "solved": 1.0, "guesses": turn + 1.0}
        hint = {"role": "user", "content": ">" if guessed < number else "<"}
        messages += [answer.message, hint]
    return unsolved
