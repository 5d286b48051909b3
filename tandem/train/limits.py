"""What a batch must keep to before a model runs it."""

from __future__ import annotations

import torch

from tandem.base.errors import DataError
from tandem.columns.proto import DataProto
from tandem.models.layouts.positions import Context
from tandem.models.token_ids import TokenIds


def check_lengths(batch: DataProto, context: Context | None) -> None:
    """Raise ``DataError`` for a sample that is longer than the ``context``; None: any is right."""
    lengths = batch.ragged("prompts").lengths + batch.ragged("responses").lengths
    if context is not None and int(lengths.max()) > context.tokens:
        raise DataError(
            f"sample {int(lengths.argmax())} has {int(lengths.max())} tokens, and {context.why}: shorten prompts "
            "and responses"
        )


def check_tokens(batch: DataProto, known: TokenIds | None) -> None:
    """Raise ``DataError`` for a trained token that is none of those ``known``; None: any is right."""
    responses = batch.ragged("responses")
    if known is None:
        return
    ids, holes = responses.values, torch.tensor(known.holes, dtype=responses.values.dtype)
    wrong = (ids < 0) | (ids >= known.count) | torch.isin(ids, holes)
    wrong &= batch.ragged("response_mask").values.bool()
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        sample = int(torch.searchsorted(responses.lengths.cumsum(0), place, right=True))
        raise DataError(
            f"sample {sample} has the token id {int(ids[place])} in its response: the tokenizer has the ids "
            f"{known}, and no others are sampled or trained"
        )
