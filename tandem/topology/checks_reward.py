"""Contradictions in the scorer: its name, its file, its parameters, those of the parts of a sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.base.errors import Problem
from tandem.base.registry import Signature
from tandem.config.schema import Config
from tandem.reward.parts import PART_KEYS, SUM
from tandem.reward.resolve import problems
from tandem.reward.static import describe
from tandem.topology.checks_parameters import check_type


@dataclass(frozen=True)
class Scorer:
    """One scorer of the config: the whole ``reward_manager``, or a part of a sum."""

    key: str
    name: str
    file: str | None
    parameters: Mapping[str, Any]


def check_reward(config: Config) -> Iterator[Problem]:
    """Of ``reward_manager``, whose type, parameters and parts are all checked without running a file of the user's."""
    reward = config.reward_manager
    yield from problems(reward.type, reward.file, reward.parameters, config.plugins)
    for scorer in _scorers(Scorer("reward_manager", reward.type, reward.file, reward.parameters)):
        signature = describe(scorer.name, scorer.file, config.plugins)
        if isinstance(signature, Signature):
            yield from _check_types(scorer, signature)
            yield from _check_ground_truth(config, scorer, signature)


def _scorers(scorer: Scorer) -> Iterator[Scorer]:
    """The scorer, and the parts below it."""
    yield scorer
    parts = scorer.parameters.get("parts")
    if scorer.file is not None or scorer.name != SUM or not isinstance(parts, list):
        return
    for index, part in enumerate(parts):
        if isinstance(part, dict) and isinstance(part.get("type"), str):
            own = {key: value for key, value in part.items() if key not in PART_KEYS}
            yield from _scorers(Scorer(f"{scorer.key}.parts[{index}]", part["type"], part.get("file"), own))


def _check_types(scorer: Scorer, signature: Signature) -> Iterator[Problem]:
    for parameter, value in scorer.parameters.items():
        if parameter in signature.parameters:
            yield from check_type(f"{scorer.key}.{parameter}", value, signature.parameters[parameter])


def _check_ground_truth(config: Config, scorer: Scorer, signature: Signature) -> Iterator[Problem]:
    data = config.data
    if "ground_truth" in signature.columns and data.answer_key is None and data.reasoning_gym is None:
        reason = f"the reward {scorer.name!r} compares with a ground truth, and the data are read without one"
        yield Problem("data.answer_key", None, reason, "Write its column, or another reward")
