"""Supervised examples as batches: padded for a loss of the user's own, or as samples for the packed engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.columns.images import IMAGES
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.data.base_source import NOT_TRAINED
from tandem.data.examples import Example


def padded_batch(examples: Sequence[Example], pad_id: int) -> dict[str, torch.Tensor]:
    """Return ``input_ids``, ``attention_mask`` and ``labels``, each (B, L) int64, right-padded; labels are not
    shifted.
    """
    rows = [torch.tensor(example.input_ids, dtype=torch.int64) for example in examples]
    masks = [torch.tensor(example.loss_mask, dtype=torch.bool) for example in examples]
    ids, learned = Ragged.from_rows(rows), Ragged.from_rows(masks)
    labels = torch.where(learned.values, ids.values, NOT_TRAINED)
    return {
        "input_ids": ids.padded(pad_id),
        "attention_mask": ids.mask().long(),
        "labels": ids.like(labels).padded(NOT_TRAINED),
    }


def as_samples(examples: Sequence[Example]) -> DataProto:
    """Return each example as a prompt (all before its first learned token, at least one token) and a response."""
    prompts, responses, masks = [], [], []
    shown = any(example.shown is not None for example in examples)
    for example in examples:
        learned = list(example.loss_mask)
        start = max(1, learned.index(1))
        prompts.append(torch.tensor(example.input_ids[:start], dtype=torch.int64))
        responses.append(torch.tensor(example.input_ids[start:], dtype=torch.int64))
        masks.append(torch.tensor(learned[start:], dtype=torch.bool))
    return DataProto(
        {
            "prompts": Ragged.from_rows(prompts),
            "responses": Ragged.from_rows(responses),
            "response_mask": Ragged.from_rows(masks),
        },
        {IMAGES: [None if e.shown is None else e.shown.patches() for e in examples]} if shown else {},
    )
