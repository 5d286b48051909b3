"""Which route model families take, as far as ``model_type`` alone says it. Importing this costs no torch.

Written by hand from what ``make families`` finds. A family that is not listed is tried when it is loaded.
"""

from __future__ import annotations

from tandem.base.errors import DataError

REFUSED: dict[str, str] = {}
"""Family -> why no route gives what a plain forward gives."""

PER_DOCUMENT: dict[str, str] = {}
"""Family -> why its documents can't share a row."""


def refuse_family(family: str) -> None:
    """Raise ``DataError`` for a family that no route is right for."""
    if family in REFUSED:
        raise DataError(f"the model family {family!r} can't be trained or sampled: {REFUSED[family]}")
