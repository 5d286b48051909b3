"""Where a run begins: anew, or from a checkpoint; and what it says of its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tandem.base.errors import ConfigError, Problem
from tandem.base.interrupts import note_saved
from tandem.base.manifest import MANIFEST, verify
from tandem.base.run_folder import CHECKPOINTS
from tandem.config.trainer import AUTO, LATEST, TrainerConfig
from tandem.data.sampler import Sampler
from tandem.observe.trackers import RunInfo
from tandem.plan.checks.run.resumed import beyond_the_end
from tandem.plan.checks.run.run_folder import nothing_to_resume, paths_read
from tandem.session.progress import Progress
from tandem.train import checkpoint
from tandem.train.checkpoint import Checkpoint


def find_checkpoint(trainer: TrainerConfig) -> Checkpoint | None:
    """Return what ``trainer.resume`` names, every file of it checked; None for a run that begins anew.

    Raises ``ConfigError`` where ``latest`` finds nothing, ``DataError`` where what is named or newest is damaged.
    """
    root = Path(trainer.output_dir).resolve() / CHECKPOINTS
    if trainer.resume is None:
        return None
    if trainer.resume not in (AUTO, LATEST):
        return checkpoint.open_checkpoint(Path(trainer.resume).resolve())
    found = checkpoint.latest(root)
    if found is None and trainer.resume == LATEST:
        raise ConfigError([nothing_to_resume(trainer)])
    if found is None:
        print(f"trainer.resume: auto: there is no checkpoint in {root}, so the run begins anew")
    return found


def continue_from(progress: Progress, source: Sampler[Any], batch_size: int, saved: Checkpoint) -> None:
    """Put the run and its data where ``saved`` has them."""
    if saved.step > progress.last:
        raise ConfigError([beyond_the_end(saved.step, progress.last, str(saved.path))])
    facts = saved.read()
    if facts["prompts"] != batch_size:
        reason = f"the saved run has {facts['prompts']} prompts per step, so its data position is another step's"
        raise ConfigError([Problem("data.train_batch_size", batch_size, reason, f"Write {facts['prompts']}")])
    progress.step = saved.step
    source.load_state_dict(facts["data"])


def run_info(trainer: TrainerConfig, config: BaseModel, steps: int, resumed: Checkpoint | None) -> RunInfo:
    """Return what the log is given of a run of ``steps`` that goes on from ``resumed``."""
    folder, document = Path(trainer.output_dir).resolve(), config.model_dump(mode="json", by_alias=True)
    shown = trainer.project, trainer.run_name or ""
    if resumed is None:
        return RunInfo(folder, steps, None, document, False, *shown)
    if resumed.path.is_relative_to(folder):
        note_saved(f"{resumed.step} steps are saved in {resumed.path.parent}")
    return RunInfo(folder, steps, resumed.step, document, resumed.path.is_relative_to(folder), *shown)


def check_inputs(config: BaseModel) -> None:
    """Raise ``DataError`` where a file of a model that Tandem wrote, and that is read, isn't as it was written."""
    for _, path in paths_read(config):
        if (path / MANIFEST).is_file():
            verify(path, own_changes=True)
