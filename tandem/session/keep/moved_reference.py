"""The reference of the fully asynchronous mode as a part of a checkpoint.

It has weights of its own. Nobody else has those of the last refresh by then, unless that was at the start of the run,
or at the very step that is saved: the actor publishes that version again.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from tandem.base.errors import ConfigError, ContractError
from tandem.config.schema import Config
from tandem.plan.plan import Plan
from tandem.plan.reference import VERSION, WEIGHTS, held_version, last_refresh, reference_problem
from tandem.roles.serving import ForwardModel
from tandem.stages.facts import REFERENCE
from tandem.train.checkpoint import Checkpoint


def is_part(config: Config, step: int) -> bool:
    """Return whether a checkpoint of ``step`` must hold the reference's weights."""
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
    save_file(tensors, folder / WEIGHTS, {VERSION: str(model.version)})
    return folder


def require_reference(config: Config, plan: Plan, saved: Checkpoint) -> None:
    """Raise ``ConfigError`` unless ``saved`` has the reference that the run goes on with. Loads no weights."""
    if not any(stage.role == REFERENCE for stage in plan.stages):
        return
    problems = list(reference_problem(config, saved.step, saved.path))
    if problems:
        raise ConfigError(problems)


def restore_reference(model: ForwardModel, saved: Checkpoint) -> None:
    """Put the reference where ``saved`` has it; one that isn't a part of it is as at the start, or comes anew."""
    version = held_version(saved.path)
    if version is not None:
        model.restore(list(load_file(saved.path / REFERENCE / WEIGHTS).items()), version)
