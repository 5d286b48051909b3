"""What an engine generates with, seen in what it answers: its likeliest next tokens beside the trainer's.

A fingerprint tells what arrived; this tells what an engine made of it, whatever it packs, casts or keeps apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class Tolerance:
    """Nats by which log-probs of equal weights may differ: on average over the prompts, and at one of them."""

    mean: float
    most: float


@dataclass(frozen=True)
class Answer:
    """The token that an engine takes for the likeliest after a prompt; its log-prob at temperature 1, if it tells."""

    token: int
    logprob: float | None


@dataclass(frozen=True, eq=False)
class Expected:
    """What the trainer's weights say of K ``prompts``, each (P,) int64.

    ``tokens`` (K,) int64 are the likeliest next ones, ``logprobs`` (K,) theirs at temperature 1, ``seconds`` (K,) those
    of the next likeliest.
    """

    prompts: Sequence[torch.Tensor]
    tokens: torch.Tensor
    logprobs: torch.Tensor
    seconds: torch.Tensor
    tolerance: Tolerance

    def difference(self, answers: Sequence[Answer]) -> torch.Tensor:
        """Return the nats (K,) by which the engine's log-probs differ at least from those of the trainer's weights.

        Who takes another token for the likeliest errs by half of its distance to that, in one of the two.
        """
        found = []
        for answer, token, logprob, second in zip(
            answers, self.tokens.tolist(), self.logprobs.tolist(), self.seconds.tolist(), strict=True
        ):
            off = 0.0 if answer.logprob is None else abs(answer.logprob - logprob)
            found.append(off if answer.token == token else max(off, (logprob - second) / 2))
        return torch.tensor(found, dtype=torch.float64)

    def objection(self, answers: Sequence[Answer]) -> str | None:
        """Return why these are not the answers of the trainer's weights, in words; None where they can be."""
        off = self.difference(answers)
        mean, most = float(off.mean()), float(off.max())
        if mean <= self.tolerance.mean and most <= self.tolerance.most:  # not where one is NaN
            return None
        return (
            f"its log-probs after {len(off)} prompts differ from the trainer's by {mean:.3g} on average, {most:.3g} at "
            f"most, where rounding explains {self.tolerance.mean:g} and {self.tolerance.most:g}"
        )


@runtime_checkable
class Probed(Protocol):
    """A receiver that generates. ``UpdatedWorker`` is one."""

    def answer(self, prompts: Sequence[torch.Tensor]) -> list[Answer]:
        """Return the likeliest next token after each prompt, with the weights that it has."""


class Probe(Protocol):
    """Who knows what engines must answer. ``LogprobProbe`` asks the trainer."""

    def expected(self, version: int, *, due: bool = False) -> Expected | None:
        """Return what the weights of this moment, to be sent as ``version``, answer; None where nobody is to be asked.

        ``due``: somebody is, who was never asked.
        """
