"""The correction stage: importance weights and rejections between the policy that sampled and the trainer's."""

from __future__ import annotations

import torch

from tandem.algorithms.rollout_correction import CorrectionRules, RolloutCorrection, correct_rollout
from tandem.columns.proto import DataProto
from tandem.config.correction import RolloutCorrectionConfig


def corrected(batch: DataProto, config: RolloutCorrectionConfig) -> DataProto:
    """Return the batch with ``tis_weights`` and ``loss_mask``, as far as ``config`` asks for them."""
    layout = batch.ragged("response_mask")
    found = _correct(batch, config)
    columns: dict[str, torch.Tensor] = {}
    rules = CorrectionRules.of(config)
    if rules.weighting is not None:
        weights = None if found is None else found.weights
        mask = layout.mask()
        columns["tis_weights"] = torch.zeros(len(layout.values)) if weights is None else weights[mask].float()
    if rules.rejections:
        columns["loss_mask"] = layout.values if found is None else found.response_mask[layout.mask()]
    return batch.union(DataProto({name: layout.like(values) for name, values in columns.items()}))


def mismatch_report(batch: DataProto, config: RolloutCorrectionConfig) -> dict[str, float]:
    """Return how far the policy that sampled a partition is from the one at the start of its step, and what was
    corrected.

    Empty where the batch lacks one of the two log-probs, or trains nothing. Names as in ``RolloutCorrection``.
    """
    if not {"old_logprobs", "rollout_logprobs"} <= set(batch.columns):
        return {}
    found = _correct(batch, config)
    if found is None:
        return {}
    return {f"mismatch/{name.removeprefix('mismatch_')}": value for name, value in found.metrics.items()}


def _correct(batch: DataProto, config: RolloutCorrectionConfig) -> RolloutCorrection | None:
    """Return the corrected batch; None where nothing is trained."""
    mask, rules = batch.padded("response_mask", False).bool(), CorrectionRules.of(config)
    if not bool(mask.any()):
        return None
    old, rollout = batch.padded("old_logprobs"), batch.padded("rollout_logprobs")
    return correct_rollout(old, rollout, mask, weighting=rules.weighting, rejections=rules.rejections)
