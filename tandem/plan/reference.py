"""The reference of the fully asynchronous mode in a checkpoint: which one a step needs, and which one is there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tandem.base.errors import Problem
from tandem.config.schema import Config
from tandem.stages.facts import REFERENCE

WEIGHTS, VERSION = "weights.safetensors", "version"
"""The file, and the name in its header of the version that it holds."""


def last_refresh(interval: int | None, step: int) -> int:
    """Return the weights version that the reference has for partition ``step``."""
    return 0 if interval is None else step // interval * interval


def reference_problem(config: Config, step: int, path: Path) -> Iterator[Problem]:
    """Yield whether the checkpoint of ``step`` at ``path`` lacks the reference that the run goes on with."""
    key, interval = "actor_rollout_ref.ref.update_interval", config.actor_rollout_ref.ref.update_interval
    wanted, held = last_refresh(interval, step), held_version(path)
    if wanted == step or held == wanted or (held is None and wanted == 0):
        return
    has = "has none: it is of another mode or interval" if held is None else f"has that of step {held}"
    reason = f"step {step} needs the reference of step {wanted}, and {path} {has}"
    remedy = "Resume with the mode and the interval of the saved run, or start a new run from its model"
    yield Problem(key, interval, reason, remedy)


def held_version(checkpoint: Path) -> int | None:
    """Return the weights version of the reference in a checkpoint; None where there is none."""
    file = checkpoint / REFERENCE / WEIGHTS
    if not file.is_file():
        return None
    with file.open("rb") as handle:
        header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
    return int(header["__metadata__"][VERSION])
