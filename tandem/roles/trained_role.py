"""What the roles that are trained share: a partition becomes optimizer steps, and the steps become metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.roles.batching import Batching
from tandem.roles.train_group import TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.train.objective import LossSum, Objective, trained_mask
from tandem.train.protocol import Exported, StepResult


class StepNames(NamedTuple):
    """What a role calls the metrics of its optimizer steps; ``skipped`` counts those of the whole run."""

    loss: str
    grad_norm: str
    lr: str
    applied: str
    skipped: str


@dataclass
class Tally:
    """What the optimizer steps of one train call did: sums over all of them, and the mini-batches that made none."""

    total: LossSum | None = None
    loss: float = 0.0
    empty: int = 0
    results: list[StepResult] = field(default_factory=list)

    def metrics(self, step: StepNames, loss: Mapping[str, str]) -> dict[str, float]:
        """Return the means over the trained tokens of all passes, and what the optimizer did; nothing where no step was
        made.

        ``step`` and ``loss`` say what the role calls them; a metric of the loss that is not in ``loss`` keeps its name.
        One that nothing was counted for has no mean, and is absent.
        """
        if self.total is None or not self.results:
            return {}
        last = self.results[-1]
        found = {
            loss.get(name, name): metric.mean for name, metric in self.total.metrics.items() if float(metric.count)
        }
        routing = self.total.routing
        return (found if routing is None else found | routing.metrics()) | {
            step.loss: self.loss / len(self.results),
            step.grad_norm: last.grad_norm,
            step.lr: last.lr,
            step.applied: float(sum(result.applied for result in self.results)),
            step.skipped: float(last.skipped),
        }


class TrainedRole:
    """The ranks of one model that is trained, and how a partition is cut into their optimizer steps.

    ``steps`` counts train calls, ``updates`` the optimizer steps that were applied. A mini-batch in which nothing is to
    be learned, or whose gradient is not finite, makes no update and is counted.
    """

    def __init__(self, ranks: TrainGroup[TrainRank], batching: Batching) -> None:
        self.ranks = ranks
        self.steps = self.updates = 0
        self._batching = batching
        self._tally = Tally()
        self._pending: LossSum | None = None

    def export(self, part: Exported = "merged") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor) of ``part`` of the weights; see ``TrainGroup.export``."""
        return self.ranks.export(part)

    def sleep(self) -> None:
        """Give up the memory that only training needs."""
        self._require_no_gradient("sleep")
        self.ranks.call(TrainRank.sleep)

    def wake(self) -> None:
        """Take back the memory that ``sleep`` gave up."""
        self.ranks.call(TrainRank.wake)

    def _train(self, batch: DataProto, objective: Objective) -> None:
        """Make all passes over ``batch`` in mini-batches of whole groups, an optimizer step each."""
        self._require_no_gradient("start a train call")
        for rows in self._batching.mini_batches(batch, self.steps):
            self._train_mini_batch(batch[rows], objective)

    def _train_mini_batch(self, batch: DataProto, objective: Objective) -> None:
        self._accumulate(batch, objective)
        self._update(objective.denominator(batch))

    def _accumulate(self, batch: DataProto, objective: Objective) -> None:
        """Add the gradient of the objective's sum over ``batch``, in the engine's micro-batches."""
        if not bool(trained_mask(batch).values.any()):
            return
        part = self.ranks.forward_backward(batch, objective)
        self._pending = part if self._pending is None else self._pending + part

    def _update(self, denominator: float) -> None:
        """Take an optimizer step on what was accumulated since the last, if anything."""
        pending, tally = self._pending, self._tally
        self._pending = None
        if pending is None:
            tally.empty += 1
            return
        tally.results.append(self.ranks.call(TrainRank.optim_step, denominator))
        tally.loss += float(pending.loss) / denominator
        tally.total = pending if tally.total is None else tally.total + pending

    def _end_step(self) -> Tally:
        """End the train call; returns what it did."""
        tally, self._tally = self._tally, Tally()
        self.steps += 1
        if tally.results:
            self.updates = tally.results[-1].updates
        return tally

    def _require_no_gradient(self, purpose: str) -> None:
        if self._pending is not None:
            raise ContractError(f"can't {purpose}: a gradient was accumulated and not applied; call apply first")

    def _counters(self) -> dict[str, int]:
        """Return what a checkpoint keeps of this object, beside the ranks' own state."""
        return {"steps": self.steps, "updates": self.updates}

    def _load(self, checkpoint: Path, counters: Mapping[str, int]) -> None:
        """Go on from the ranks' state in the folder ``checkpoint``, and from ``counters``."""
        self.ranks.call(TrainRank.load_checkpoint, checkpoint)
        self.steps, self.updates = counters["steps"], counters["updates"]
