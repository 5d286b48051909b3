"""What the header of a safetensors file says of the tensors in it. Importing this costs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FLOATS = frozenset({"F64", "F32", "BF16", "F16"})
"""What safetensors calls the dtypes whose numbers are the weights themselves."""


def header_of(file: Path) -> dict[str, Any]:
    """Return name -> dtype, shape and place of each tensor: a length in eight bytes, then JSON.

    Raises ``OSError`` or ``ValueError`` for what is no such file.
    """
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(min(length, file.stat().st_size)))
    if not isinstance(header, dict):
        raise ValueError(f"the header of {file.name} is no JSON object")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def packed_weight(header: Mapping[str, Any]) -> str | None:
    """Say which weight is stored as integers or in 8 bits: its scales are elsewhere, or nowhere; None where none is.

    Tables that a model looks numbers up in are integers rightly: only what is called a matrix or a norm is looked at.
    """
    for name, entry in header.items():
        if name.endswith((".weight", "_proj")) and entry["dtype"] not in _FLOATS:
            return f"{name} is stored as {entry['dtype']}, and weights are trained and pushed in full precision"
    return None
