"""The critic role: a model of its own that values every state and is trained towards the returns."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from tandem.base.errors import DataError, DeadlineError
from tandem.columns.proto import DataProto
from tandem.models.value_model import ValueModel
from tandem.roles.batching import Batching
from tandem.roles.train_group import TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.train import saved
from tandem.train.checkpoint import Checkpoint
from tandem.train.objective import LossSum
from tandem.train.protocol import StepResult
from tandem.train.value_objective import ValueObjective

CRITIC = "critic"
"""The part of a checkpoint that is the critic's, and what it is called in messages."""


class Critic:
    """The ranks of the value model, and how a partition is cut into its optimizer steps.

    ``steps`` counts train calls, ``updates`` the optimizer steps that were applied. ``metrics`` are those of the last
    train call. ``model`` is what the ranks train, as far as this process knows it: what it is, not what it learned.
    """

    def __init__(
        self, model: ValueModel, ranks: TrainGroup[TrainRank], batching: Batching, objective: ValueObjective
    ) -> None:
        self.model, self.ranks = model, ranks
        self.steps = self.updates = 0
        self.metrics: dict[str, float] = {}
        self._batching, self._objective = batching, objective
        self._over = threading.Condition()

    def values(self, batch: DataProto) -> DataProto:
        """The batch with ``values``: of the state before each trained token, 0 at tokens that aren't trained."""
        return batch.union(DataProto({"values": self.ranks.forward(batch, ["values"])["values"]}))

    def step(self, batch: DataProto) -> dict[str, float]:
        """Train on a batch with ``values`` (before this step) and ``returns``; the metrics.

        Passes and mini-batches are those of the actor, unless the config says otherwise. A mini-batch in which nothing
        is to be learned, or whose gradient is not finite, is skipped and counted.
        """
        total: LossSum | None = None
        results: list[StepResult] = []
        loss = 0.0
        for rows in self._batching.mini_batches(batch, self.steps):
            mini = batch[rows]
            if not bool(mini.ragged("response_mask").values.any()):
                continue
            part = self.ranks.forward_backward(mini, self._objective)
            denominator = self._objective.denominator(mini)
            results.append(self.ranks.call(TrainRank.optim_step, denominator))
            loss += float(part.loss) / denominator
            total = part if total is None else total + part
        self.metrics = {}
        if total is not None:
            self.updates = results[-1].updates
            self.metrics = _summary(total, loss / len(results), results) | _fit(batch)
        with self._over:
            self.steps += 1
            self._over.notify_all()
        return self.metrics

    def await_steps(self, steps: int, seconds: float) -> None:
        """Wait until so many train calls are over, in another thread. Raises ``DeadlineError``."""
        with self._over:
            if not self._over.wait_for(lambda: self.steps >= steps, seconds):
                raise DeadlineError(
                    f"the critic waited {seconds:g} s to be trained on partition {steps - 1}; blocked by the "
                    "actor's loop, which trains it"
                )

    def train(self, batch: DataProto) -> DataProto:
        """``step`` as a stage between others: the batch goes on as it came."""
        self.step(batch)
        return batch

    # --- weights and checkpoints -------------------------------------------------------------------------------------

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) of all weights; see ``TrainGroup.export``."""
        return self.ranks.export()

    def save(self, root: Path, step: int) -> Checkpoint:
        """Write a checkpoint of model, optimizer and counters under ``root``, where nothing else is then."""
        shutil.rmtree(root, ignore_errors=True)  # of a process that was killed while saving
        facts = {CRITIC: {"steps": self.steps, "updates": self.updates}}
        return self.ranks.call(TrainRank.save_checkpoint, root, step, facts, 1)

    def load(self, run: Checkpoint) -> None:
        """Go on from the critic's part of a checkpoint of a run. Raises ``DataError`` where it has none."""
        found = saved.checkpoints_in(run.path / CRITIC)
        if not found:
            raise DataError(
                f"{run.path} holds no critic, and critic.enable is true: resume with the estimator of the saved run, "
                "or start a new run from its model"
            )
        self.ranks.call(TrainRank.load_checkpoint, found[-1][1])
        own = saved.read_state(found[-1][1])["facts"][CRITIC]
        self.steps, self.updates = own["steps"], own["updates"]

    def sleep(self) -> None:
        """Give up the memory that only training needs."""
        self.ranks.call(TrainRank.sleep)

    def wake(self) -> None:
        """Undo ``sleep``."""
        self.ranks.call(TrainRank.wake)


def _summary(total: LossSum, loss: float, results: list[StepResult]) -> dict[str, float]:
    last = results[-1]
    return {
        "value/loss": loss,
        "value/mean": total.metrics["value_mean"].mean,
        "value/clipfrac": total.metrics["value_clipfrac"].mean,
        "value/grad_norm": last.grad_norm,
        "value/lr": last.lr,
        "value/applied": float(sum(result.applied for result in results)),
        "value/skipped_steps": float(last.skipped),
    }


def _fit(batch: DataProto) -> dict[str, float]:
    """How well the values before the step foretold the returns, over the trained tokens.

    Explained variance is 1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant; there is
    none where all returns are equal.
    """
    mask = batch.ragged("response_mask").values
    values, returns = (batch.ragged(name).values[mask].double() for name in ("values", "returns"))
    spread = float(returns.var(correction=0))
    fit = {"value/returns": float(returns.mean())}
    if spread > 0:
        fit["value/explained_variance"] = 1.0 - float((returns - values).var(correction=0)) / spread
    return fit
