"""How the columns and the meta_info of several batches become one: equal values are kept, a conflict is an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from tandem.base.errors import ContractError
from tandem.columns.equality import same_value

Value = TypeVar("Value")


def join_tables(left: Mapping[str, Value], right: Mapping[str, Value]) -> dict[str, Value]:
    """Return the columns of both; a column that both have must be equal in dtype, lengths and values."""
    for name in left.keys() & right.keys():
        if not same_value(left[name], right[name]):
            raise ContractError(
                f"union: column {name!r} has other values on the right than on the left; rename or pop one of them"
            )
    return {**left, **right}


def merge_meta(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of both; a key that both have must be equal."""
    for key in left.keys() & right.keys():
        if not same_value(left[key], right[key]):
            raise ContractError(f"meta_info[{key!r}] is {left[key]!r} on one side and {right[key]!r} on the other")
    return {**left, **right}


def join_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the meta_info of joined parts: keys that several parts have must be equal, but ``metrics`` are gathered.

    ``metrics`` is a dict or a list of dicts; each of its keys becomes the list of the values of all parts in order, a
    value that is a list already adds its entries. So joining in two steps gives the same as joining at once.
    """
    joined: dict[str, Any] = {}
    gathered: dict[str, list[Any]] = {}
    for meta in metas:
        rest = {key: value for key, value in meta.items() if key != "metrics"}
        joined = merge_meta(joined, rest)
        metrics = meta.get("metrics")
        for one in metrics if isinstance(metrics, list) else [metrics or {}]:
            for key, value in one.items():
                gathered.setdefault(key, []).extend(value if isinstance(value, list) else [value])
    return {**joined, "metrics": gathered} if gathered else joined
