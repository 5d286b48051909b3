"""Exact equality: same dtype, same shape, same values, and a NaN equals a NaN."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tandem.columns.ragged import Ragged


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Return whether both are equal in dtype, shape and every value, wherever the two live."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.detach().cpu(), b.detach().cpu()
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def same_ragged(a: Ragged, b: Ragged) -> bool:
    """Return whether both hold rows of the same lengths, and the same values in each."""
    return torch.equal(a.offsets, b.offsets) and same_tensor(a.values, b.values)


def same_value(a: Any, b: Any) -> bool:
    """Return whether both are equal in type and value through lists, tuples and dicts; 1, 1.0 and True are three
    different values.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return same_tensor(a, b)
    if isinstance(a, Ragged):
        return same_ragged(a, b)
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_value(v, b[k]) for k, v in a.items())
    return bool(a == b)
