"""Python values as strict JSON and back, exactly: tuples, NaN, infinities and keys that are no strings survive."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from tandem.base.errors import ContractError

_FLOAT, _TUPLE, _DICT = "$float", "$tuple", "$dict"


def dumps(value: Any, what: str) -> str:
    """Return ``value`` (None, bool, int, float, str, list, tuple, dict of such, numpy scalars) as JSON text in ASCII.

    Raises ``ContractError`` naming ``what`` and the place inside it for anything else.
    """
    return json.dumps(_encode(value, what), allow_nan=False, separators=(",", ":"))


def loads(text: str | bytes) -> Any:
    """Return the value that ``dumps`` was given."""
    return _decode(json.loads(text))


def _encode(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        return {_DICT: [[_encode(k, f"a key of {where}"), _encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}
    plain = _scalar(value)
    if plain is not None:
        return _encode(plain, where)
    raise ContractError(
        f"{where} is a {type(value).__name__}, which JSON can't hold. Put None, bool, int, float, str, list, tuple or "
        "dict there, or make it a tensor column"
    )


def _scalar(value: Any) -> bool | int | float | str | None:
    """Return the Python scalar inside a numpy scalar, a str subclass or an enum of those; None if there isn't one."""
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return plain(value)
    inner = value.item() if isinstance(value, np.generic) else None
    return inner if type(inner) in (bool, int, float, str) else None


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag == _FLOAT:
            return float(inner)
        if tag == _TUPLE:
            return tuple(_decode(item) for item in inner)
        if tag == _DICT:
            return {_decode(k): _decode(v) for k, v in inner}
    return {key: _decode(item) for key, item in value.items()}
