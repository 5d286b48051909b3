"""The critic role: a model of its own that values every state and is trained towards the returns."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from tandem.base.errors import DataError, DeadlineError
from tandem.columns.proto import DataProto
from tandem.models.value_model import ValueModel
from tandem.roles.batching import Batching
from tandem.roles.train_group import TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.roles.trained_role import StepNames, TrainedRole
from tandem.train import saved
from tandem.train.checkpoint import Checkpoint
from tandem.train.objective import trained_mask
from tandem.train.value_objective import ValueObjective

CRITIC = "critic"
"""The part of a checkpoint that is the critic's, and what it is called in messages."""


class Critic(TrainedRole):
    """The value model, trained in the mini-batches of the actor unless the config says otherwise.

    ``metrics`` are those of the last train call. ``model`` is what the ranks train, as far as this process knows it:
    what it is, not what it learned.
    """

    def __init__(
        self, model: ValueModel, ranks: TrainGroup[TrainRank], batching: Batching, objective: ValueObjective
    ) -> None:
        super().__init__(ranks, batching)
        self.model = model
        self.metrics: dict[str, float] = {}
        self._objective = objective
        self._over = threading.Condition()

    def values(self, batch: DataProto) -> DataProto:
        """Return the batch with ``values``: of the state before each trained token, 0 at tokens that aren't trained."""
        return batch.union(DataProto({"values": self.ranks.forward(batch, ["values"])["values"]}))

    def step(self, batch: DataProto) -> dict[str, float]:
        """Train on a batch with ``values`` (before this step) and ``returns``; the metrics.

        A token that the correction leaves out of the actor's loss is left out here too.
        """
        self._train(batch, self._objective)
        with self._over:
            tally = self._end_step()
            self._over.notify_all()
        self.metrics = tally.metrics(_STEP, _LOSS) | (_fit(batch) if tally.results else {})
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
        """Run ``step`` as a stage between others: the batch goes on as it came."""
        self.step(batch)
        return batch

    # --- weights and checkpoints -------------------------------------------------------------------------------------

    def save(self, root: Path, step: int) -> Checkpoint:
        """Write a checkpoint of model, optimizer and counters under ``root``, where nothing else is then."""
        shutil.rmtree(root, ignore_errors=True)  # of a process that was killed while saving
        facts = {CRITIC: self._counters()}
        return self.ranks.call(TrainRank.save_checkpoint, root, step, facts, 1)

    def load(self, run: Checkpoint) -> None:
        """Go on from the critic's part of a checkpoint of a run. Raises ``DataError`` where it has none."""
        found = saved.checkpoints_in(run.path / CRITIC)
        if not found:
            raise DataError(
                f"{run.path} holds no critic, and critic.enable is true: resume with the estimator of the saved run, "
                "or start a new run from its model"
            )
        path = found[-1][1]
        self._load(path, saved.read_state(path)["facts"][CRITIC])


def _fit(batch: DataProto) -> dict[str, float]:
    """Return how well the values before the step foretold the returns, over the trained tokens.

    Explained variance is 1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant; there is
    none where all returns are equal.
    """
    mask = trained_mask(batch).values
    values, returns = (batch.ragged(name).values[mask].double() for name in ("values", "returns"))
    spread = float(returns.var(correction=0))
    fit = {"value/returns": float(returns.mean())}
    if spread > 0:
        fit["value/explained_variance"] = 1.0 - float((returns - values).var(correction=0)) / spread
    return fit


_STEP = StepNames("value/loss", "value/grad_norm", "value/lr", "value/applied", "value/skipped_steps")
_LOSS = {"value_mean": "value/mean", "value_clipfrac": "value/clipfrac"}
