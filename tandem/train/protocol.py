"""What a training engine can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.train.objective import LossSum, Objective

Exported = Literal["merged", "adapter", "base"]
"""All weights with adapters added in; the adapters alone; everything but them."""


@dataclass(frozen=True)
class TopTokens:
    """The ``count`` likeliest tokens in each place of an answer, among those with an id below ``below``.

    ``temperature`` of their log-probs; None: that of all others.

    Asked of a forward they come as ``top_logprobs`` float32 and ``top_ids`` int32, (N, count) each.
    """

    count: int
    below: int
    temperature: float | None = None


Wanted = Literal["logprobs", "entropies", "sum_pi_squared", "values"] | TopTokens


def logprobs_and(squares: bool) -> list[Wanted]:
    """Return what a forward is asked for: log-probs, with or without the sums of squared probabilities."""
    return ["logprobs", "sum_pi_squared"] if squares else ["logprobs"]


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did.

    ``applied`` is False where it was skipped, for a gradient that is not finite or zero everywhere: then parameters,
    moments, schedule and ``updates`` are as before. ``grad_norm`` is that of the divided gradient before clipping,
    ``lr`` the rate used. ``updates`` and ``skipped`` count all steps so far.
    """

    applied: bool
    grad_norm: float
    lr: float
    updates: int
    skipped: int


class TrainEngine(Protocol):
    """A model that is trained, wherever its shards are: ``FsdpEngine``, and ``ValueEngine`` for a critic.

    With several ranks every method is called by all of them, each with its own part of the batch; sums and metrics
    come back for all ranks together. An optimizer step, from as many parts as there are::

        for part in parts:
            engine.forward_backward(part, objective)
        result = engine.optim_step(objective.denominator(batch))
    """

    def forward(self, batch: DataProto, want: Sequence[Wanted]) -> dict[str, Ragged]:
        """Return per-token results by name, without gradient, on the CPU, aligned with ``responses`` in the batch's
        order.

        float32 but for ids; 0 where ``response_mask`` is False.
        """

    def forward_backward(self, batch: DataProto, objective: Objective) -> LossSum:
        """Add the gradient of the objective's *sum* over the batch; gives the undivided loss and metrics, detached."""

    def optim_step(self, denominator: float) -> StepResult:
        """Divide the accumulated gradient once, clip it, update the parameters, and clear it."""

    def shards(self) -> dict[str, torch.Tensor]:
        """Return the local shards of the trained parameters, to be copied out of and into in place."""

    def export(self, part: Exported = "merged") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor) of ``part``: merged under Hugging Face names, tied ones under both names."""

    def sleep(self) -> None:
        """Give up the memory that only training needs."""

    def wake(self) -> None:
        """Take back the memory that ``sleep`` gave up."""

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and progress, as sharded tensors and numbers; refers to live memory."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict`` of an engine with the same model, on any number of ranks."""
