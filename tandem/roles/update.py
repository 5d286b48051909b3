"""Partitions in parts: put together in one order, or trained part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tandem.columns.proto import DataProto
from tandem.roles.actor import Actor
from tandem.roles.loss import Loss
from tandem.train.objective import Objective


def in_canonical_order(parts: Sequence[DataProto]) -> DataProto:
    """Return the samples of all parts by ticket, then by index in the group."""
    batch = DataProto.concat(parts)
    groups, index = batch.dense("group_ids"), batch.dense("sample_index")
    order = torch.argsort(groups * (int(index.max()) + 1) + index)
    return batch.reorder(order)


class Slices(Protocol):
    """The train call of a step in parts: each complete part as it arrives, then the end of the step.
    ``AccumulatedSlices`` makes one optimizer step of all, ``SteppedSlices`` one of each.
    """

    def train(self, part: DataProto) -> None:
        """Learn from a part whose columns are complete."""

    def finish(self, batch: DataProto) -> dict[str, float]:
        """Finish, once all parts are in, which together are ``batch``. Returns the metrics of ``Actor.step``."""


class AccumulatedSlices:
    """The same single optimizer step, its gradient summed while later parts are still generated.

    Exact for everything that looks at no more than a group at once, which the plan makes sure of.
    """

    def __init__(self, actor: Actor, objective: Objective) -> None:
        self._actor, self._objective = actor, objective

    def train(self, part: DataProto) -> None:
        """Add the gradient of one slice; no weight changes yet."""
        self._actor.accumulate(Loss(part, self._objective))

    def finish(self, batch: DataProto) -> dict[str, float]:
        """Take the one optimizer step of the partition, divided by the counts of the whole ``batch``."""
        return self._actor.apply(self._objective.denominator(batch))


class SteppedSlices:
    """One optimizer step per part; only the weights after the last one are published."""

    def __init__(self, actor: Actor, objective: Objective) -> None:
        self._actor, self._objective = actor, objective

    def train(self, part: DataProto) -> None:
        """Take one optimizer step on the slice."""
        self._actor.step_slice(Loss(part, self._objective))

    def finish(self, batch: DataProto) -> dict[str, float]:
        """Return the metrics of all steps of the partition together."""
        del batch
        return self._actor.end_slices()


SLICES: dict[str, Callable[[Actor, Objective], Slices]] = {"accumulate": AccumulatedSlices, "step": SteppedSlices}
"""By ``execution.train_pipelining``."""
