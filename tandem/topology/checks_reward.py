"""Contradictions in the scorer: its name, its file, its parameters, those of the parts of a sum."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tandem.base.errors import Problem
from tandem.base.registry import Signature
from tandem.config.schema import Config
from tandem.reward.parts import Part, read_parts
from tandem.reward.resolve import problems
from tandem.reward.static import describe
from tandem.topology.checks_parameters import check_type


def check_reward(config: Config) -> Iterator[Problem]:
    """Of ``reward_manager``, whose type, parameters and parts are all checked without running a file of the user's."""
    reward = config.reward_manager
    yield from problems(reward.type, reward.file, reward.parameters, config.plugins)
    for scorer in scorers_of(config):
        signature = describe(scorer.type, scorer.file, config.plugins)
        if isinstance(signature, Signature):
            yield from _check_types(scorer, signature)
            yield from _check_ground_truth(config, scorer, signature)
            yield from _check_time(config, scorer, signature)
        yield from _check_folder(scorer)


def scorers_of(config: Config) -> Iterator[Part]:
    """The scorer of ``reward_manager``, and those inside it."""
    reward = config.reward_manager
    yield from _scorers(Part("reward_manager", reward.type, reward.file, reward.parameters))


def _scorers(scorer: Part) -> Iterator[Part]:
    """The scorer, and those inside it."""
    yield scorer
    parts = read_parts(scorer.type, scorer.file, scorer.parameters, scorer.key)
    for part in [] if isinstance(parts, Problem) else parts:
        yield from _scorers(part)


def _check_types(scorer: Part, signature: Signature) -> Iterator[Problem]:
    for parameter, value in scorer.parameters.items():
        if parameter in signature.parameters:
            yield from check_type(f"{scorer.key}.{parameter}", value, signature.parameters[parameter])


def _check_ground_truth(config: Config, scorer: Part, signature: Signature) -> Iterator[Problem]:
    data = config.data
    if "ground_truth" in signature.columns and data.answer_key is None and data.reasoning_gym is None:
        reason = f"the reward {scorer.type!r} compares with a ground truth, and the data are read without one"
        yield Problem("data.answer_key", None, reason, "Write its column, or another reward")


def _check_time(config: Config, scorer: Part, signature: Signature) -> Iterator[Problem]:
    """A scorer that gives itself time (``total_s``) must be done before its process is ended."""
    if "total_s" not in signature.parameters:
        return
    own = scorer.parameters.get("total_s", signature.parameters["total_s"].default)
    limit = config.reward_manager.timeout_s
    if isinstance(own, int | float) and own >= limit:
        reason = f"{scorer.type!r} may take {own:g} s for a sample ({scorer.key}.total_s), and is ended before that"
        yield Problem("reward_manager.timeout_s", limit, reason, f"Write more than {own:g}, or a smaller total_s")


def _check_folder(scorer: Part) -> Iterator[Problem]:
    """A reward model's folder is there, where its path can't be a hub id."""
    path = scorer.parameters.get("path")
    if scorer.type != "reward_model" or scorer.file is not None or not isinstance(path, str):
        return
    if path.startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir():
        yield Problem(f"{scorer.key}.path", path, "there is no such folder", "Name a Hugging Face folder or a hub id")
