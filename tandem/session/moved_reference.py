"""The reference of the fully asynchronous mode as a part of a checkpoint.

It has weights of its own. Nobody else has those of the last refresh by then, unless that was at the start of the run,
or at the very step that is saved: the actor publishes that version again.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tandem.base.errors import ConfigError, ContractError, Problem
from tandem.config.schema import Config
from tandem.plan.placement import uses_reference
from tandem.roles.serving import ForwardModel
from tandem.stages.facts import REFERENCE
from tandem.train.checkpoint import Checkpoint

_WEIGHTS, _VERSION = "weights.safetensors", "version"


def last_refresh(interval: int | None, step: int) -> int:
    """The weights version that the reference has for partition ``step``."""
    return 0 if interval is None else step // interval * interval


def is_part(config: Config, step: int) -> bool:
    """Whether a checkpoint of ``step`` must hold the reference's weights."""
    return last_refresh(config.actor_rollout_ref.ref.update_interval, step) not in (0, step)


def write_reference(model: ForwardModel, config: Config, step: int, root: Path) -> Path:
    """Write the weights of ``model`` to a folder under ``root``, for the checkpoint of ``step``.

    They don't change meanwhile: the next refresh needs a version that the actor hasn't made.
    """
    wanted = last_refresh(config.actor_rollout_ref.ref.update_interval, step)
    if model.version != wanted:
        raise ContractError(f"after step {step} the reference has weights version {model.version}, not {wanted}")
    folder = root / f".{REFERENCE}.partial"
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed while saving
    folder.mkdir(parents=True)
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in model.held()}  # tied ones can't share memory
    save_file(tensors, folder / _WEIGHTS, {_VERSION: str(model.version)})
    return folder


def require_reference(config: Config, saved: Checkpoint) -> None:
    """Raise ``ConfigError`` unless ``saved`` has the reference that the run goes on with. Loads no weights."""
    if config.execution.mode != "fully_async" or not uses_reference(config):
        return
    key, interval = "actor_rollout_ref.ref.update_interval", config.actor_rollout_ref.ref.update_interval
    wanted, held = last_refresh(interval, saved.step), _version(saved)
    if wanted == saved.step or held == wanted or (held is None and wanted == 0):
        return
    has = "has none: it is of another mode or interval" if held is None else f"has that of step {held}"
    reason = f"step {saved.step} needs the reference of step {wanted}, and {saved.path} {has}"
    remedy = "Resume with the mode and the interval of the saved run, or start a new run from its model"
    raise ConfigError([Problem(key, interval, reason, remedy)])


def restore_reference(model: ForwardModel, saved: Checkpoint) -> None:
    """Put the reference where ``saved`` has it; one that isn't a part of it is as at the start, or comes anew."""
    version = _version(saved)
    if version is not None:
        model.restore(list(load_file(saved.path / REFERENCE / _WEIGHTS).items()), version)


def _version(saved: Checkpoint) -> int | None:
    path = saved.path / REFERENCE / _WEIGHTS
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as weights:
        return int(weights.metadata()[_VERSION])
