"""Batches of documents that show images."""

from __future__ import annotations

import torch

from tandem.columns.images import Images
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tests.images.tiny import prompt

Document = tuple[Images | None, list[int], list[int]]
"""What it shows, its text, its answer."""


def rows(of: list[list[int]]) -> Ragged:
    """Rows of ids."""
    return Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in of])


def batch(documents: list[Document]) -> DataProto:
    """Samples, all tokens of whose answers are learned."""
    responses = rows([answer for _, _, answer in documents])
    return DataProto(
        {
            "prompts": rows([prompt(shown, text) for shown, text, _ in documents]),
            "responses": responses,
            "response_mask": responses.like(torch.ones(len(responses.values), dtype=torch.bool)),
        },
        {"images": [shown for shown, _, _ in documents]},
    )
