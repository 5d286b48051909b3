"""Contradictions in the scorer: its name, its file, its parameters, those of the parts of a sum."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.base.errors import Problem
from tandem.base.registry import Signature
from tandem.config.schema import Config
from tandem.reward.resolve import problems
from tandem.reward.static import describe
from tandem.topology.checks_parameters import check_type

SUM = "weighted_sum"
PACKAGES = {"math": ("math_verify", "math")}
"""Scorer -> the module that it needs and the extra that brings it."""


def check_reward(config: Config) -> Iterator[Problem]:
    """Of ``reward_manager``, whose type, parameters and parts are all checked without running a file of the user's."""
    reward = config.reward_manager
    yield from problems(reward.type, reward.file, reward.parameters, config.plugins)
    yield from _check_types("reward_manager", reward.type, reward.file, reward.parameters, config.plugins)


def _check_types(
    key: str, name: str, file: str | None, parameters: Mapping[str, Any], plugins: Sequence[str]
) -> Iterator[Problem]:
    signature = describe(name, file, plugins)
    if isinstance(signature, Signature):
        for parameter, value in parameters.items():
            if parameter in signature.parameters:
                yield from check_type(f"{key}.{parameter}", value, signature.parameters[parameter])
    if file is not None:
        return
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name][0]) is None:
        module, extra = PACKAGES[name]
        remedy = f"Install it with pip install 'tandem-rl[{extra}]'"
        yield Problem(f"{key}.type", name, f"the package {module} is not installed", remedy)
    parts = parameters.get("parts")
    if name == SUM and isinstance(parts, list):
        for index, part in enumerate(parts):
            if isinstance(part, dict) and isinstance(part.get("type"), str):
                own = {k: v for k, v in part.items() if k not in ("type", "file", "weight", "name")}
                yield from _check_types(f"{key}.parts[{index}]", part["type"], part.get("file"), own, plugins)
