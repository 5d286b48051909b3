"""How sub-batches become one update: merged at the end, accumulated slice by slice, or stepped slice by slice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from tandem.columns.proto import DataProto
from tandem.roles.actor import Actor
from tandem.roles.loss import Loss
from tandem.stages.stage import BatchStage
from tandem.train.objective import Objective

Around = Callable[[str], AbstractContextManager[None]]
Trained = tuple[DataProto, dict[str, float]]


def in_canonical_order(parts: Sequence[DataProto]) -> DataProto:
    """The samples of all parts by ticket, then by index in the group."""
    batch = DataProto.concat(parts)
    groups, index = batch.dense("group_ids"), batch.dense("sample_index")
    order = torch.argsort(groups * (int(index.max()) + 1) + index)
    return batch.reorder(order)


class Update(ABC):
    """One partition's update. Sub-batches come in as they arrive; ``finish`` gives the whole batch and metrics.

    ``run`` is the context around each planned stage.
    """

    def __init__(self, actor: Actor, objective: Objective, stages: Sequence[BatchStage], run: Around) -> None:
        self._actor = actor
        self._objective = objective
        self._stages = stages
        self._run = run
        self._parts: list[DataProto] = []

    @abstractmethod
    def add(self, sub_batch: DataProto) -> None:
        """A sub-batch whose forwards are done."""

    @abstractmethod
    def finish(self) -> Trained:
        """All sub-batches are in."""

    def _complete(self, batch: DataProto) -> DataProto:
        for stage in self._stages:
            with self._run(stage.name):
                batch = stage(batch)
        return batch


class MergedUpdate(Update):
    """Advantages over the merged partition, then one train call: the statistics see everything."""

    def add(self, sub_batch: DataProto) -> None:
        self._parts.append(sub_batch)

    def finish(self) -> Trained:
        batch = self._complete(in_canonical_order(self._parts))
        with self._run("train"):
            return batch, self._actor.step(Loss(batch, self._objective))


class AccumulatedUpdate(Update):
    """The same single optimizer step, its gradient summed while later sub-batches are still generated.

    Exact for everything that looks at no more than a group at once, which the plan makes sure of.
    """

    def add(self, sub_batch: DataProto) -> None:
        batch = self._complete(sub_batch)
        with self._run("train"):
            self._actor.accumulate(Loss(batch, self._objective))
        self._parts.append(batch)

    def finish(self) -> Trained:
        batch = in_canonical_order(self._parts)
        with self._run("train"):
            return batch, self._actor.apply(self._objective.denominator(batch))


class SteppedUpdate(Update):
    """One optimizer step per sub-batch; only the weights after the last one are published."""

    def add(self, sub_batch: DataProto) -> None:
        batch = self._complete(sub_batch)
        with self._run("train"):
            self._actor.step_slice(Loss(batch, self._objective))
        self._parts.append(batch)

    def finish(self) -> Trained:
        return in_canonical_order(self._parts), self._actor.end_slices()


UPDATES: dict[str, type[Update]] = {"off": MergedUpdate, "accumulate": AccumulatedUpdate, "step": SteppedUpdate}
"""By ``execution.train_pipelining``."""
