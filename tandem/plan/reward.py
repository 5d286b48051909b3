"""Where rewards are made: scoring processes, and the devices of models among the scorers."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.base.registry import Signature
from tandem.config.schema import Config
from tandem.plan.checks.reward import scorers_of
from tandem.reward.static import describe


@dataclass(frozen=True)
class ScoringPlan:
    """``processes`` that each hold all scorers (0: the training process does); ``devices`` of those that are models.

    A device is named as torch names it and is not among the ``device_groups`` of the plan: it is the user's to keep
    free, or to share.
    """

    types: tuple[str, ...]
    processes: int
    devices: tuple[str, ...]


def plan_scoring(config: Config) -> ScoringPlan:
    """The reward role of a config."""
    scorers = list(scorers_of(config))
    devices: dict[str, None] = {}
    for scorer in scorers:
        signature = describe(scorer.type, scorer.file, config.plugins)
        if isinstance(signature, Signature) and "device" in signature.parameters:
            devices[str(scorer.parameters.get("device", signature.parameters["device"].default))] = None
    processes = 0 if config.runtime.threads else config.reward_manager.workers
    return ScoringPlan(tuple(dict.fromkeys(scorer.type for scorer in scorers)), processes, tuple(devices))
