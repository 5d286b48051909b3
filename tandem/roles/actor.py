"""The actor role: one model that is trained, and that takes the place of its reference for a forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.roles.batching import Batching
from tandem.roles.loss import Loss
from tandem.roles.train_group import TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.stages.facts import OLD_ACTOR, REF
from tandem.train.checkpoint import Checkpoint
from tandem.train.objective import LossSum, trained_mask
from tandem.train.protocol import Exported, StepResult, logprobs_and
from tandem.weights.store import ACTOR


@dataclass
class _StepTally:
    """What the optimizer steps of one training step did: sums over all of them, and those in which nothing was."""

    total: LossSum | None = None
    loss: float = 0.0
    empty: int = 0
    results: list[StepResult] = field(default_factory=list)


class Actor:
    """The ranks that train, and how a partition is cut into optimizer steps.

    ``steps`` counts train calls (the weights version), ``updates`` the optimizer steps that were applied. A step is
    one ``step``; or sub-batches one by one: any number of ``accumulate`` and one ``apply`` (a single optimizer step),
    or any number of ``step_slice`` (an optimizer step each) and one ``end_slices``.

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
        self.ranks = ranks
        self.steps = self.updates = self.moved = 0
        self._refresh_every = refresh_every
        self._batching = batching
        self._tally = _StepTally()
        self._pending: LossSum | None = None
        self._in_slices = False
        if reference_is_base:
            ranks.call(TrainRank.tag_base, REF)
        elif keep_reference:
            ranks.call(TrainRank.save_tag, REF)

    # --- forwards ----------------------------------------------------------------------------------------------------

    def old_logprobs(self, batch: DataProto, *, squares: bool = False) -> DataProto:
        """The batch with ``old_logprobs``: of the weights as they were at the start of this step.

        ``squares``: also with ``sum_pi_squared``, of the same weights.
        """
        return self._with_logprobs(batch, "old_logprobs", OLD_ACTOR if self._in_slices else ACTOR, squares)

    def ref_logprobs(self, batch: DataProto) -> DataProto:
        """The batch with ``ref_logprobs``: of the reference, by switching the weight tag."""
        return self._with_logprobs(batch, "ref_logprobs", REF)

    def refresh_reference(self) -> None:
        """The reference becomes the actor as it is now."""
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
        for rows in self._batching.mini_batches(loss.batch, self.steps):
            mini = Loss(loss.batch[rows], loss.objective)
            self.accumulate(mini)
            self._update(mini.objective.denominator(mini.batch))
        return self._end_step() | values

    def accumulate(self, loss: Loss) -> None:
        """Add the gradient of the loss's sum over its batch; ``apply`` makes the optimizer step."""
        if not bool(trained_mask(loss.batch).values.any()):
            return
        part = self.ranks.forward_backward(loss.batch, loss.objective)
        self._pending = part if self._pending is None else self._pending + part

    def apply(self, denominator: float) -> dict[str, float]:
        """End the step with one optimizer step on all that was accumulated.

        ``denominator`` is the objective's, of the whole partition. Metrics are those of ``step``.
        """
        self._update(denominator)
        return self._end_step()

    def step_slice(self, loss: Loss) -> None:
        """One optimizer step on a sub-batch; old log-probs are of the weights before the first until ``end_slices``."""
        self._require_no_gradient("train on a slice")
        if not self._in_slices:
            self.ranks.call(TrainRank.save_tag, OLD_ACTOR)
            self._in_slices = True
        self.accumulate(loss)
        self._update(loss.objective.denominator(loss.batch))

    def end_slices(self) -> dict[str, float]:
        """End the step that ``step_slice`` began. Metrics are those of ``step``, over all slices."""
        self._in_slices = False
        return self._end_step()

    # --- weights and checkpoints -------------------------------------------------------------------------------------

    def export(self, part: Exported = "merged") -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full tensor) of ``part`` of the weights; see ``TrainGroup.export``."""
        return self.ranks.export(part)

    def require_actor(self, purpose: str) -> None:
        """Refuse ``purpose`` unless the actor's own weights are in place."""
        self.ranks.call(TrainRank.require_actor, purpose)

    def save(
        self, root: Path, step: int, *, facts: Mapping[str, Any], keep: int, parts: Mapping[str, Path] | None = None
    ) -> Checkpoint:
        """Write a checkpoint of model, optimizer, tags and counters, with ``facts`` and the folders ``parts``."""
        self._require_no_gradient("save a checkpoint")
        own = {"actor": {"steps": self.steps, "updates": self.updates}}
        return self.ranks.call(TrainRank.save_checkpoint, root, step, {**facts, **own}, keep, parts)

    def load(self, saved: Checkpoint) -> None:
        """Go on from what ``save`` wrote."""
        self.ranks.call(TrainRank.load_checkpoint, saved.path)
        own = saved.read()["actor"]
        self.steps, self.updates = own["steps"], own["updates"]
        self.moved = self.steps

    def sleep(self) -> None:
        """Give up the memory that only training needs."""
        self._require_no_gradient("sleep")
        self.ranks.call(TrainRank.sleep)

    def wake(self) -> None:
        """Undo ``sleep``."""
        self.ranks.call(TrainRank.wake)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _with_logprobs(self, batch: DataProto, column: str, tag: str, squares: bool = False) -> DataProto:
        found = self.ranks.forward(batch, logprobs_and(squares), tag)
        return batch.union(DataProto({column: found.pop("logprobs"), **found}))

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

    def _require_no_gradient(self, purpose: str) -> None:
        if self._pending is not None:
            raise ContractError(f"can't {purpose}: a gradient was accumulated and not applied; call apply first")

    def _update(self, denominator: float) -> None:
        """An optimizer step on what was accumulated since the last, if anything."""
        pending, tally = self._pending, self._tally
        self._pending = None
        if pending is None:
            tally.empty += 1
            return
        tally.results.append(self.ranks.call(TrainRank.optim_step, denominator))
        tally.loss += float(pending.loss) / denominator
        tally.total = pending if tally.total is None else tally.total + pending

    def _end_step(self) -> dict[str, float]:
        tally, self._tally = self._tally, _StepTally()
        self.steps += 1
        if tally.results and tally.results[-1].updates > self.updates:
            self.updates, self.moved = tally.results[-1].updates, self.steps
        if self._refresh_every is not None and self.steps % self._refresh_every == 0:
            self.refresh_reference()
        imbalance = self.ranks.take_imbalance()
        balance = {} if imbalance is None else {"balance/max_over_mean": imbalance}
        return {"optim/empty_mini_batches": float(tally.empty), **balance, **_summary(tally)}


def _summary(tally: _StepTally) -> dict[str, float]:
    if tally.total is None or not tally.results:
        return {}
    last = tally.results[-1]
    metrics = {_METRIC_NAMES.get(name, name): m.mean for name, m in tally.total.metrics.items()}
    return metrics | {
        "loss/policy": tally.loss / len(tally.results),
        "grad/norm": last.grad_norm,
        "optim/lr": last.lr,
        "optim/applied": float(sum(result.applied for result in tally.results)),
        "optim/skipped_steps": float(last.skipped),
    }


_METRIC_NAMES = {
    "kl": "kl/mean",
    "entropy": "entropy/mean",
    "clipfrac": "loss/clipfrac",
    "clipfrac_lower": "loss/clipfrac_lower",
    "ppo_kl": "loss/ppo_kl",
}
