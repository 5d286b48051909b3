"""Preferences as batches, what a loss wants to know of them beside log-probs, and how well a model tells them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.algorithms.preference_losses import reference_point_of
from tandem.columns.images import IMAGES
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.data.preferences import Preference
from tandem.roles.actor import Actor
from tandem.stages.stage import BatchStage
from tandem.train.micro_batches import canonical_order
from tandem.train.objective import LossSum, Objective


def as_groups(preferences: Sequence[Preference]) -> DataProto:
    """Return each preference as a group of its answers, the better one first; all samples of a group have its
    prompt, and its images as one object.
    """
    patches = [None if item.shown is None else item.shown.patches() for item in preferences]
    reads = any(item.shown is not None for item in preferences)
    rows = [(group, index, item) for group, item in enumerate(preferences) for index in range(len(item.answers))]
    answers = [item.answers[index] for _, index, item in rows]
    return DataProto(
        {
            "prompts": Ragged.from_rows([torch.tensor(item.prompt_ids, dtype=torch.int64) for _, _, item in rows]),
            "responses": Ragged.from_rows([torch.tensor(answer.ids, dtype=torch.int64) for answer in answers]),
            "response_mask": Ragged.from_rows([torch.tensor(answer.learned, dtype=torch.bool) for answer in answers]),
            "preferred": torch.tensor([answer.preferred for answer in answers]),
            "group_ids": torch.tensor([group for group, _, _ in rows]),
            "sample_index": torch.tensor([index for _, index, _ in rows]),
        },
        {
            "uid": [item.uid for _, _, item in rows],
            "prompt_text": [item.text for _, _, item in rows],
            "data_source": [item.data_source for _, _, item in rows],
            **({IMAGES: [patches[group] for group, _, _ in rows]} if reads else {}),
        },
    )


def mismatched(batch: DataProto) -> DataProto:
    """Return each prompt with the answers of the next group, the last with those of the first; groups are of equal
    size.
    """
    ordered = _scored(batch).reorder(canonical_order(batch))
    size = len(ordered) // len(ordered.dense("group_ids").unique())
    other = torch.arange(len(ordered)).roll(-size)
    moved = {name: ordered.ragged(name).take(other) for name in ("responses", "response_mask")}
    return DataProto({**ordered.batch, **moved}, ordered.non_tensor_batch)


def _scored(batch: DataProto) -> DataProto:
    """Return what log-probs depend on."""
    shown = [IMAGES] if IMAGES in batch.non_tensor_batch else []
    return batch.select("prompts", "responses", "response_mask", "group_ids", "sample_index", *shown)


class Scorer(Protocol):
    """What gives log-probs of answers. An ``Actor`` does."""

    def old_logprobs(self, batch: DataProto) -> DataProto:
        """Return the batch with ``old_logprobs``: of the policy as it is now."""

    def ref_logprobs(self, batch: DataProto) -> DataProto:
        """Return the batch with ``ref_logprobs``: of the reference."""


@dataclass(frozen=True)
class Against:
    """Two models as a ``Scorer``: the policy that was trained, and the reference that it began as."""

    policy: Actor
    reference: Actor

    def old_logprobs(self, batch: DataProto) -> DataProto:
        """Return the batch with the policy's log-probs."""
        return self.policy.old_logprobs(batch)

    def ref_logprobs(self, batch: DataProto) -> DataProto:
        """Return the batch with the reference's log-probs, from a model of its own."""
        scored = self.reference.old_logprobs(_scored(batch))
        return batch.union(DataProto({"ref_logprobs": scored.ragged("old_logprobs")}))


def with_reference_point(batch: DataProto, actor: Scorer) -> DataProto:
    """Return the batch with ``reference_point``: KTO's z on mismatched pairs, under the weights of this moment."""
    scored = actor.ref_logprobs(actor.old_logprobs(mismatched(batch)))
    mask = scored.padded("response_mask", False).bool()
    z = reference_point_of(scored.padded("old_logprobs"), scored.padded("ref_logprobs"), mask)
    return batch.union(DataProto({"reference_point": z.float().expand(len(batch)).clone()}))


class PreferenceEvaluator:
    """The loss and its metrics on held-out preferences.

    All are one batch, so that what a loss estimates over a batch (KTO's z) doesn't depend on how they are cut; only
    log-probs are kept of them at once, and the actor's budget cuts its forwards.
    """

    def __init__(
        self,
        preferences: Sequence[Preference],
        actor: Scorer,
        stages: Sequence[BatchStage],
        objective: Objective,
    ) -> None:
        self._preferences = list(preferences)
        self._actor, self._stages, self._objective = actor, stages, objective

    def metrics(self) -> dict[str, float]:
        """Return ``eval/loss``, and the metrics of the loss under ``eval/`` (accuracy, margin, rewards, log-probs)."""
        batch = as_groups(self._preferences)
        for stage in self._stages:
            batch = stage(batch)
        found = self._sum(batch)
        means = {name.partition("/")[2] or name: metric.mean for name, metric in found.metrics.items()}
        loss = float(found.loss) / self._objective.denominator(batch)
        return {f"eval/{name}": value for name, value in {"loss": loss, **means}.items()}

    @torch.no_grad()
    def _sum(self, batch: DataProto) -> LossSum:
        scored = self._actor.old_logprobs(batch)
        columns: Mapping[str, torch.Tensor] = {
            name: scored.padded(name) if isinstance(scored.batch[name], Ragged) else scored.dense(name)
            for name in ("response_mask", *self._objective.columns)
        }
        return self._objective.numerator(columns, scored.padded("old_logprobs"), None)
