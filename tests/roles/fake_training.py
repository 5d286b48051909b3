"""A training engine without a model, and scored batches for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.train.objective import LossSum, Objective
from tandem.train.protocol import StepResult, Wanted


class FakeTrainEngine:
    """One weight, ``w``: each step that is applied adds 1 to it. Log-probs are minus the weight.

    ``trained`` are the (group, sample) pairs of each forward_backward; steps in ``skip`` (counted from 1) find a
    gradient that is not finite.
    """

    def __init__(self, skip: Sequence[int] = ()) -> None:
        self.weight = torch.zeros(1)
        self.trained: list[list[tuple[int, int]]] = []
        self.denominators: list[float] = []
        self.calls: list[str] = []
        self.updates = self.skipped = 0
        self._skip = set(skip)

    def forward(self, batch: DataProto, want: Sequence[Wanted]) -> dict[str, Ragged]:
        self.calls.append("forward")
        responses = batch.ragged("responses")
        return {name: responses.like(-self.weight.expand(len(responses.values)).clone()) for name in want}

    def forward_backward(self, batch: DataProto, objective: Objective) -> LossSum:
        self.calls.append("forward_backward")
        pairs = zip(batch.dense("group_ids").tolist(), batch.dense("sample_index").tolist(), strict=True)
        self.trained.append(list(pairs))
        return LossSum(torch.tensor(float(len(batch))))

    def optim_step(self, denominator: float) -> StepResult:
        self.calls.append("optim_step")
        self.denominators.append(denominator)
        applied = self.updates + self.skipped + 1 not in self._skip
        self.updates += applied
        self.skipped += not applied
        if applied:
            self.weight += 1
        return StepResult(applied, 1.0 if applied else float("nan"), 0.1, self.updates, self.skipped)

    def shards(self) -> dict[str, torch.Tensor]:
        return {"w": self.weight}

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", self.weight

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight.copy_(state["w"])


@dataclass(frozen=True)
class SamplesObjective:
    """Divides by the samples of the mini-batch."""

    columns: tuple[str, ...] = ()
    optional_columns: tuple[str, ...] = ()
    wants_entropy: bool = False
    needs_entropy: bool = False
    router_coef: float = 0.0
    whole_groups: bool = False

    def numerator(
        self, columns: Mapping[str, torch.Tensor], logprobs: torch.Tensor, entropies: torch.Tensor | None
    ) -> LossSum:
        return LossSum(-logprobs.sum())

    def denominator(self, batch: DataProto) -> float:
        return float(len(batch))


def scored(groups: int, n: int = 2, *, rewards: Sequence[float] | None = None, length: int = 3) -> DataProto:
    """A partition after scoring; rewards are 0, 1, 2 ... in each group unless given."""
    count = groups * n
    responses = Ragged.from_lengths(torch.ones(count * length, dtype=torch.int64), [length] * count)
    values = torch.arange(count).remainder(n).float() if rewards is None else torch.tensor(list(rewards))
    return DataProto(
        {
            "prompts": Ragged.from_lengths(torch.ones(count, dtype=torch.int64), [1] * count),
            "responses": responses,
            "response_mask": responses.like(torch.ones(count * length, dtype=torch.bool)),
            "rollout_logprobs": responses.like(torch.full((count * length,), -1.0)),
            "token_versions": responses.like(torch.zeros(count * length, dtype=torch.int32)),
            "truncated": torch.zeros(count, dtype=torch.bool),
            "rewards": values,
            "reward_valid": torch.ones(count, dtype=torch.bool),
            "group_ids": torch.arange(groups).repeat_interleave(n),
            "sample_index": torch.arange(n).repeat(groups),
        }
    )
