"""The parts of a scorer that combines several, as they are written in YAML. Pure: nothing of the user's is run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tandem.base.errors import Problem

SUM = "weighted_sum"
PART_KEYS = ("type", "file", "weight", "name")
"""Keys of a part that are not its scorer's parameters."""


class WrittenPart(NamedTuple):
    """One part of a weighted sum; ``name`` is its metric's."""

    weight: float
    name: str
    type: str
    file: str | None
    parameters: dict[str, Any]


def component_names(type_: str, file: str | None, parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the K terms that each reward of this scorer is the sum of; none for a scorer without such."""
    parts = read_parts(parameters, "") if type_ == SUM and file is None else []
    return () if isinstance(parts, Problem) else tuple(part.name for part in parts)


def read_parts(parameters: Mapping[str, Any], key: str) -> list[WrittenPart] | Problem:
    """The parts of a weighted sum, whose names are all different, or what is wrong with them."""
    written = parameters.get("parts")
    if not isinstance(written, Sequence) or isinstance(written, str) or not written:
        remedy = "Write a list: parts: [{type: gsm8k, weight: 1.0}, {type: length_penalty, weight: 0.1, ...}]"
        return Problem(f"{key}.parts", written, "a weighted sum has at least one part", remedy)
    parts: list[WrittenPart] = []
    names: set[str] = set()
    for i, part in enumerate(written):
        found = _read_part(part, f"{key}.parts[{i}]")
        if isinstance(found, Problem):
            return found
        if found.name in names:
            reason = "two parts would report the same metric"
            return Problem(f"{key}.parts[{i}].name", found.name, reason, "Give one of them another name:")
        names.add(found.name)
        parts.append(found)
    return parts


def _read_part(part: object, at: str) -> WrittenPart | Problem:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        return Problem(at, part, "a part names its scorer", "Write {type: NAME, weight: W, ...parameters}")
    weight, name, file = part.get("weight", 1.0), part.get("name", part["type"]), part.get("file")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        return Problem(f"{at}.weight", weight, "a weight is a number, and finite", "Write for example weight: 0.5")
    if file is not None and not isinstance(file, str):
        return Problem(f"{at}.file", file, "a file is named by its path", "Write file: my_rewards.py")
    rest = {str(key): value for key, value in part.items() if key not in PART_KEYS}
    return WrittenPart(float(weight), str(name), part["type"], file, rest)
