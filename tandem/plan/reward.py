"""Where rewards are made: scoring processes, and the devices of models among the scorers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from tandem.base.errors import DataError
from tandem.base.registry import Signature
from tandem.config.schema import Config
from tandem.data.files import open_tables
from tandem.data.rows import Row
from tandem.plan.checks.samples.data import SAMPLED_ROWS
from tandem.plan.checks.samples.reward import scorers_of
from tandem.reward.scorers.programs import read_tests
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
    """Return the reward role of a config."""
    scorers = list(scorers_of(config))
    devices: dict[str, None] = {}
    for scorer in scorers:
        signature = describe(scorer.type, scorer.file, config.plugins)
        if isinstance(signature, Signature) and "device" in signature.parameters:
            devices[str(scorer.parameters.get("device", signature.parameters["device"].default))] = None
    processes = 0 if config.runtime.threads else config.reward_manager.workers
    return ScoringPlan(tuple(dict.fromkeys(scorer.type for scorer in scorers)), processes, tuple(devices))


def reward_notes(config: Config) -> Iterator[str]:
    """Note what is worth knowing of the scorers."""
    if any(scorer.type == "code" and scorer.file is None for scorer in scorers_of(config)) and _has_asserts(config):
        yield (
            f"the tests in data.answer_key {config.data.answer_key!r} are asserts, which run in the program's own "
            "interpreter: one that patches Python, returns an object whose == always says yes, or reads the tests "
            "through its caller's frames, passes them without being right. A model under training finds such ways. "
            'Prefer {"inputs": [...], "outputs": [...], "fn_name": ...}: what is expected then stays outside'
        )


def _has_asserts(config: Config) -> bool:
    """Return whether one of the first rows is tested by code; False where the data can't be read: others report
    that.
    """
    key = config.data.answer_key
    if key is None:
        return False
    for file in config.data.train_files:
        try:
            rows = [row for row in islice(open_tables([file])[0].scan(), SAMPLED_ROWS) if isinstance(row, Row)]
        except (DataError, OSError):
            continue
        for row in rows:
            try:
                if any(test.kind == "assert" and "assert" in test.given for test in read_tests(row.find(key))):
                    return True
            except DataError:
                continue
    return False
