"""The scorers inside a scorer that combines several, as YAML writes them. Pure: nothing of the user's is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tandem.base.errors import Problem

DEFAULT_ROUTES: tuple[Mapping[str, Any], ...] = (
    {"source": "openai/gsm8k", "type": "gsm8k"},
    {"source": ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"], "type": "math"},
    {"source": ["math_dapo", "math", "math_dapo_reasoning", "aime*"], "type": "math_dapo"},
    {"source": "numina_*", "type": "prime_math"},
    {"source": ["codecontests", "apps", "codeforces", "taco"], "type": "code"},
    {"source": "searchR1_*", "type": "qa_em"},
)
"""What ``by_source`` does where no routes are written: the names under which these data sets are commonly published."""


class Part(NamedTuple):
    """One scorer inside another: ``key`` is where it stands in the config.

    In a sum it has a ``weight`` and the ``name`` of its metric; in a choice by source, the ``sources`` that it is for.
    """

    key: str
    type: str
    file: str | None
    parameters: dict[str, Any]
    weight: float = 1.0
    name: str = ""
    sources: tuple[str, ...] = ()


Parts = list[Part] | Problem


def read_parts(type_: str, file: str | None, parameters: Mapping[str, Any], key: str) -> Parts:
    """Return the scorers inside the scorer ``type_``, none for one that stands alone; or what is wrong with them."""
    if file is not None or type_ not in COMBINING:
        return []
    return COMBINING[type_](parameters, key)


def component_names(type_: str, file: str | None, parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the K terms that each reward of this scorer is the sum of; none for a scorer without such."""
    if type_ != "weighted_sum":
        return ()
    parts = read_parts(type_, file, parameters, "")
    return () if isinstance(parts, Problem) else tuple(part.name for part in parts)


def _terms(parameters: Mapping[str, Any], key: str) -> Parts:
    """Return the parts of a weighted sum; the names are all different."""
    written = parameters.get("parts")
    if not isinstance(written, Sequence) or isinstance(written, str) or not written:
        remedy = "Write a list: parts: [{type: gsm8k, weight: 1.0}, {type: length_penalty, weight: 0.1, ...}]"
        return Problem(f"{key}.parts", written, "a weighted sum has at least one part", remedy)
    parts: list[Part] = []
    for i, entry in enumerate(written):
        found = _read(entry, f"{key}.parts[{i}]", ("weight", "name"), "{type: NAME, weight: W, ...parameters}")
        if isinstance(found, Problem):
            return found
        weight, name = entry.get("weight", 1.0), str(entry.get("name", found.type))
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            reason = "a weight is a number, and finite"
            return Problem(f"{found.key}.weight", weight, reason, "Write for example weight: 0.5")
        if name in [part.name for part in parts]:
            reason = "two parts would report the same metric"
            return Problem(f"{found.key}.name", name, reason, "Give one of them another name:")
        parts.append(found._replace(weight=float(weight), name=name))
    if not any(part.weight for part in parts):
        reason = "all weights are 0, and so would every reward be"
        return Problem(f"{parts[0].key}.weight", parts[0].weight, reason, "Give a part another weight, such as 1.0")
    return parts


def _routes(parameters: Mapping[str, Any], key: str) -> Parts:
    """Return the parts of a choice by source."""
    written = parameters.get("routes", DEFAULT_ROUTES)
    example = "{source: openai/gsm8k, type: gsm8k}"
    if not isinstance(written, Sequence) or isinstance(written, str) or not written:
        return Problem(
            f"{key}.routes", written, "there is no route", f"Write a list: routes: [{example}], or no routes"
        )
    parts: list[Part] = []
    for i, entry in enumerate(written):
        found = _read(entry, f"{key}.routes[{i}]", ("source",), example)
        if isinstance(found, Problem):
            return found
        source = entry.get("source")
        sources = [source] if isinstance(source, str) else source
        if not isinstance(sources, Sequence) or not sources or not all(isinstance(name, str) for name in sources):
            reason = "a route says for which data_source it is: a name, or a list of names, with * for any text"
            return Problem(f"{found.key}.source", source, reason, f"Write {example}")
        parts.append(found._replace(sources=tuple(sources), name=found.type))
    return parts


def _read(entry: object, at: str, own: tuple[str, ...], example: str) -> Part | Problem:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("type"), str):
        return Problem(at, entry, "a part names its scorer", f"Write {example}")
    file = entry.get("file")
    if file is not None and not isinstance(file, str):
        return Problem(f"{at}.file", file, "a file is named by its path", "Write file: my_rewards.py")
    parameters = {str(key): value for key, value in entry.items() if key not in ("type", "file", *own)}
    return Part(at, entry["type"], file, parameters)


COMBINING: Mapping[str, Callable[[Mapping[str, Any], str], Parts]] = {"weighted_sum": _terms, "by_source": _routes}
"""Scorers made of others -> what reads those."""
