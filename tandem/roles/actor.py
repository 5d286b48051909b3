"""The actor role: one model that is trained, and that takes the place of its reference for a forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tandem.base.seeding import derive_seed
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.roles.loss import Loss
from tandem.train.objective import LossSum
from tandem.train.protocol import StepResult, TrainEngine
from tandem.weights.store import ACTOR, WeightStore

REF = "ref"


@dataclass(frozen=True)
class Batching:
    """How a partition becomes optimizer steps: ``epochs`` passes, mini-batches of ``groups`` whole groups."""

    groups: int
    epochs: int
    seed: int


class Actor:
    """A training engine, its weight tags, and how a partition is cut into optimizer steps.

    ``steps`` counts train calls (the weights version), ``updates`` the optimizer steps that were applied.
    """

    def __init__(self, engine: TrainEngine, batching: Batching, *, keep_reference: bool) -> None:
        self.engine = engine
        self.weights = WeightStore(engine.shards())
        self.steps = self.updates = 0
        self._batching = batching
        if keep_reference:
            self.weights.save(REF)

    def old_logprobs(self, batch: DataProto) -> DataProto:
        """The batch with ``old_logprobs``: of the weights as they are now."""
        return self._with_logprobs(batch, "old_logprobs", ACTOR)

    def ref_logprobs(self, batch: DataProto) -> DataProto:
        """The batch with ``ref_logprobs``: of the reference, by switching the weight tag."""
        return self._with_logprobs(batch, "ref_logprobs", REF)

    def refresh_reference(self) -> None:
        """The reference becomes the actor as it is now."""
        self.weights.save(REF)

    def step(self, loss: Loss) -> dict[str, float]:
        """Train on the loss's batch: ``epochs`` passes in mini-batches of whole groups.

        A mini-batch in which nothing is to be learned, or whose gradient is not finite, is skipped and counted. Returns
        metrics: means over the trained tokens of all passes.
        """
        self.weights.require_actor("train")
        total: LossSum | None = None
        results: list[StepResult] = []
        loss_value = 0.0
        empty = 0
        for rows in self._mini_batches(loss.batch):
            mini = loss.batch[rows]
            if not bool(mini.ragged("response_mask").values.any()):
                empty += 1
                continue
            denominator = loss.objective.denominator(mini)
            part = self.engine.forward_backward(mini, loss.objective)
            results.append(self.engine.optim_step(denominator))
            loss_value += float(part.loss) / denominator
            total = part if total is None else total + part
        self.steps += 1
        if results:
            self.updates = results[-1].updates
        return {"optim/empty_mini_batches": float(empty)} | _summary(total, loss_value / max(len(results), 1), results)

    def _with_logprobs(self, batch: DataProto, column: str, tag: str) -> DataProto:
        with self.weights.using(tag):
            logprobs: Ragged = self.engine.forward(batch, ["logprobs"])["logprobs"]
        return batch.union(DataProto({column: logprobs}))

    def _mini_batches(self, batch: DataProto) -> Iterator[torch.Tensor]:
        """Rows of each mini-batch: a seeded shuffle of whole groups for every pass, from the canonical order."""
        groups = batch.dense("group_ids")
        ids = groups.unique()
        if self._batching.groups >= len(ids):
            for _ in range(self._batching.epochs):
                yield torch.arange(len(batch))
            return
        for epoch in range(self._batching.epochs):
            generator = torch.Generator().manual_seed(
                derive_seed(self._batching.seed, "mini-batches", self.steps, epoch)
            )
            shuffled = ids[torch.randperm(len(ids), generator=generator)]
            for chosen in shuffled.split(self._batching.groups):
                yield torch.isin(groups, chosen).nonzero()[:, 0]


def _summary(total: LossSum | None, loss: float, results: list[StepResult]) -> dict[str, float]:
    if total is None or not results:
        return {}
    last = results[-1]
    metrics = {_METRIC_NAMES.get(name, name): m.mean for name, m in total.metrics.items()}
    return metrics | {
        "loss/policy": loss,
        "grad/norm": last.grad_norm,
        "optim/lr": last.lr,
        "optim/applied": float(sum(result.applied for result in results)),
        "optim/skipped_steps": float(last.skipped),
    }


_METRIC_NAMES = {
    "kl": "kl/mean",
    "entropy": "entropy/mean",
    "clipfrac": "loss/clipfrac",
    "clipfrac_lower": "loss/clipfrac_lower",
    "ppo_kl": "loss/ppo_kl",
}
