"""The actor role: one model that is trained, and that takes the place of its reference for a forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.roles.batching import Batching
from tandem.roles.loss import Loss
from tandem.roles.train_group import TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.roles.trained_role import StepNames, TrainedRole
from tandem.stages.facts import OLD_ACTOR, REF
from tandem.train.checkpoint import Checkpoint
from tandem.train.objective import Objective, PolicyObjective
from tandem.train.protocol import logprobs_and
from tandem.weights.store import ACTOR


class Actor(TrainedRole):
    """The policy that is trained, and its reference.

    ``steps`` is the weights version. A step is one ``step``; or sub-batches one by one: any number of ``accumulate``
    and one ``apply`` (a single optimizer step), or any number of ``step_slice`` (an optimizer step each) and one
    ``end_slices``.

    The reference is a copy of the weights at the start, or, with ``reference_is_base``, the model without its adapters.
    It becomes the actor as it is after each ``refresh_every`` steps. ``moved`` is the first version with the weights of
    this moment: steps without an update count as versions too.
    """

    def __init__(
        self,
        ranks: TrainGroup[TrainRank],
        batching: Batching,
        *,
        keep_reference: bool,
        reference_is_base: bool = False,
        refresh_every: int | None = None,
    ) -> None:
        super().__init__(ranks, batching)
        self.moved = 0
        self._refresh_every = refresh_every
        self._in_slices = False
        if reference_is_base:
            ranks.call(TrainRank.tag_base, REF)
        elif keep_reference:
            ranks.call(TrainRank.save_tag, REF)

    # --- forwards ----------------------------------------------------------------------------------------------------

    def old_logprobs(self, batch: DataProto, *, squares: bool = False) -> DataProto:
        """Return the batch with ``old_logprobs``: of the weights as they were at the start of this step.

        ``squares``: also with ``sum_pi_squared``, of the same weights.
        """
        return self._with_logprobs(batch, "old_logprobs", OLD_ACTOR if self._in_slices else ACTOR, squares)

    def ref_logprobs(self, batch: DataProto) -> DataProto:
        """Return the batch with ``ref_logprobs``: of the reference, by switching the weight tag."""
        return self._with_logprobs(batch, "ref_logprobs", REF)

    def refresh_reference(self) -> None:
        """Let the reference become the actor as it is now."""
        self.ranks.call(TrainRank.save_tag, REF)

    # --- training ----------------------------------------------------------------------------------------------------

    def step(self, loss: Loss) -> dict[str, float]:
        """Train on the loss's batch: ``epochs`` passes in mini-batches of whole groups; its critic first, if any.

        A mini-batch in which nothing is to be learned, or whose gradient is not finite, is skipped and counted. Returns
        metrics: means over the trained tokens of all passes. Raises ``ContractError`` for a loss whose old log-probs
        were to be those of a first pass that is over.
        """
        self._require_loss(loss)
        self._require_no_gradient("start a train call")
        values = {} if loss.critic is None else loss.critic.step(loss.batch)
        self._train(loss.batch, self._dated(loss.objective))
        return self._finish() | values

    def accumulate(self, loss: Loss) -> None:
        """Add the gradient of the loss's sum over its batch; ``apply`` makes the optimizer step."""
        self._accumulate(loss.batch, self._dated(loss.objective))

    def apply(self, denominator: float) -> dict[str, float]:
        """End the step with one optimizer step on all that was accumulated.

        ``denominator`` is the objective's, of the whole partition. Metrics are those of ``step``.
        """
        self._update(denominator)
        return self._finish()

    def step_slice(self, loss: Loss) -> None:
        """Take one optimizer step on a sub-batch; old log-probs are of the weights before the first until
        ``end_slices``.
        """
        self._require_no_gradient("train on a slice")
        if not self._in_slices:
            self.ranks.call(TrainRank.save_tag, OLD_ACTOR)
            self._in_slices = True
        self._train_mini_batch(loss.batch, self._dated(loss.objective))

    def end_slices(self) -> dict[str, float]:
        """End the step that ``step_slice`` began. Metrics are those of ``step``, over all slices."""
        self._in_slices = False
        return self._finish()

    # --- weights and checkpoints -------------------------------------------------------------------------------------

    def require_actor(self, purpose: str) -> None:
        """Refuse ``purpose`` unless the actor's own weights are in place."""
        self.ranks.call(TrainRank.require_actor, purpose)

    def save(
        self, root: Path, step: int, *, facts: Mapping[str, Any], keep: int, parts: Mapping[str, Path] | None = None
    ) -> Checkpoint:
        """Write a checkpoint of model, optimizer, tags and counters, with ``facts`` and the folders ``parts``."""
        self._require_no_gradient("save a checkpoint")
        own = {"actor": self._counters()}
        return self.ranks.call(TrainRank.save_checkpoint, root, step, {**facts, **own}, keep, parts)

    def load(self, saved: Checkpoint) -> None:
        """Go on from what ``save`` wrote."""
        self._load(saved.path, saved.read()["actor"])
        self.moved = self.steps

    # --- inside ------------------------------------------------------------------------------------------------------

    def _with_logprobs(self, batch: DataProto, column: str, tag: str, squares: bool = False) -> DataProto:
        found = self.ranks.forward(batch, logprobs_and(squares), tag)
        return batch.union(DataProto({column: found.pop("logprobs"), **found}))

    def _dated(self, objective: Objective) -> Objective:
        """Return the objective, which knows the version of the weights that are trained where it compares with it."""
        return replace(objective, version=self.steps) if isinstance(objective, PolicyObjective) else objective

    def _require_loss(self, loss: object) -> None:
        if not isinstance(loss, Loss):
            raise ContractError(f"actor.step takes the Loss that compute_grpo_loss gives, got {type(loss).__name__}")
        if loss.version is not None and loss.version < self.moved:
            raise ContractError(
                f"this loss was computed for the weights of version {loss.version}, which were trained since: its old "
                "log-probs were to be those of the first pass, and none are kept. For several passes or mini-batches "
                "write actor_rollout_ref.actor.ppo_epochs and ppo_mini_batch_size, and call actor.step once; or write "
                "algorithm.old_logprobs: recompute, and call it as often as you like"
            )

    def _finish(self) -> dict[str, float]:
        before, tally = self.updates, self._end_step()
        if self.updates > before:
            self.moved = self.steps
        if self._refresh_every is not None and self.steps % self._refresh_every == 0:
            self.refresh_reference()
        imbalance = self.ranks.take_imbalance()
        balance = {} if imbalance is None else {"balance/max_over_mean": imbalance}
        return {"optim/empty_mini_batches": float(tally.empty), **balance, **tally.metrics(_STEP, _LOSS)}


_STEP = StepNames("loss/policy", "grad/norm", "optim/lr", "optim/applied", "optim/skipped_steps")
_LOSS = {
    "kl": "kl/mean",
    "entropy": "entropy/mean",
    "clipfrac": "loss/clipfrac",
    "clipfrac_lower": "loss/clipfrac_lower",
    "ppo_kl": "loss/ppo_kl",
}
