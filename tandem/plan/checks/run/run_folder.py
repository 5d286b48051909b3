"""The folder that a run writes to, and what it finds there: read, never changed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tandem.base.errors import DataError, Problem
from tandem.base.run_folder import CHECKPOINTS, FINAL_FOLDER, KEY, METRICS_FILE, in_the_way, is_of_a_run, user_files
from tandem.config.trainer import AUTO, LATEST, TrainerConfig
from tandem.observe.metrics import read_rows
from tandem.train import saved
from tandem.train.saved import STATE, checkpoints_in

RESUME = "trainer.resume"
_MOUNTS = Path("/proc/self/mounts")
_KERNEL = frozenset(
    {
        *("binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "efivarfs", "mqueue", "nsfs"),
        *("proc", "pstore", "securityfs", "selinuxfs", "sysfs", "tracefs"),
    }
)
"""File systems in which nothing can be kept; elsewhere there are none of these."""

_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_PATHS = re.compile(r"(\.|_)(path|file|files|folder|dir)(\[\d+\])?$|\.by_source\.[^.]*$")
"""Keys of what is read, those of plug-ins' parameters too."""


def check_output(trainer: TrainerConfig, document: BaseModel) -> Iterator[Problem]:
    """Check whether ``trainer.output_dir`` can be written, holds nothing of the user's, and is not what the run
    reads.
    """
    if not trainer.output_dir:
        yield Problem(KEY, "", "a run needs a folder to write to", "Write a folder, such as runs/first")
        return
    if variable := _VARIABLE.search(trainer.output_dir):
        reason = f"nothing is put in for {variable[0]} here, so that the folder would be called so"
        yield Problem(KEY, trainer.output_dir, reason, "Write the path itself")
        return
    folder = place = Path(trainer.output_dir).expanduser()
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        strange = in_the_way(folder) if folder.is_dir() and not _goes_on_in(folder, trainer) else []
    except OSError as error:
        reason = f"no folder can have this name: {error.strerror}"
        yield Problem(KEY, trainer.output_dir, reason, "Write another one")
        return
    if not place.is_dir():
        yield Problem(KEY, trainer.output_dir, f"{place} is a file", "Write a folder")
    elif kind := _of_the_kernel(place):
        reason = f"{place} is the kernel's ({kind}): no file is kept there"
        yield Problem(KEY, trainer.output_dir, reason, "Write another folder")
    elif not os.access(place, os.W_OK):
        yield Problem(KEY, trainer.output_dir, f"{place} can't be written to", "Write another folder")
    elif strange:
        yield user_files(folder, strange)
    else:
        yield from _check_read(trainer, document)


def _of_the_kernel(folder: Path) -> str | None:
    """Return the kind of the file system of ``folder`` where it shows the kernel's state; None where it keeps files.

    Permissions don't say it: root may write everywhere, and is refused only when a folder is made.
    """
    found: tuple[int, str | None] = (-1, None)
    with suppress(OSError):
        for line in _MOUNTS.read_text("utf-8", "replace").splitlines():
            point, kind = line.split()[1:3]
            place = Path(point.replace("\\040", " "))
            if folder.resolve().is_relative_to(place) and len(place.parts) >= found[0]:  # later ones hide earlier ones
                found = len(place.parts), kind
    return found[1] if found[1] in _KERNEL else None


def _check_read(trainer: TrainerConfig, document: BaseModel) -> Iterator[Problem]:
    """Check that models, data and code, which are read, are not where the run writes."""
    folder = Path(trainer.output_dir).expanduser().resolve()
    for key, path in paths_read(document):
        place, inside = path.resolve(), path.resolve().is_relative_to(folder)
        name = place.relative_to(folder).parts[0] if inside and place != folder else ""
        if is_of_a_run(name):
            what = f"the run reads {path} ({key}), which a run in this folder would move or replace"
        elif folder == place or (place.is_file() and place.parent == folder):
            what = f"the run reads from it ({key}: {path})"
        else:
            continue
        remedy = "Write a folder of its own for the run"
        yield Problem(KEY, trainer.output_dir, what, f"{remedy}, such as {folder / 'run' if not name else 'runs/next'}")
        return


def paths_read(document: BaseModel) -> Iterator[tuple[str, Path]]:
    """Yield (key, path) of what a config names to be read, where it is on this disk: models, adapters, data, code."""

    def walk(value: Any, key: str) -> Iterator[tuple[str, Path]]:
        if isinstance(value, Mapping):
            for name, item in value.items():
                yield from walk(item, f"{key}.{name}" if key else str(name))
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                yield from walk(item, f"{key}[{number}]")
        elif isinstance(value, str) and value and key != KEY and _PATHS.search(key):
            path = Path(value).expanduser()
            with suppress(OSError, ValueError):  # no name of a file
                if path.exists():
                    yield key, path

    yield from walk(document.model_dump(by_alias=True), "")


def _goes_on_in(folder: Path, trainer: TrainerConfig) -> bool:
    """Return whether the run goes on with what is in ``folder``."""
    if trainer.resume is None:
        return False
    if trainer.resume in (AUTO, LATEST):
        return any(folder.glob(f"{CHECKPOINTS}/step_*"))
    return Path(trainer.resume).expanduser().resolve().is_relative_to(folder.resolve())


@dataclass(frozen=True)
class Saved:
    """The checkpoint that a run goes on from, as far as its small files say: ``facts`` are those of ``state.json``."""

    step: int
    path: Path
    facts: Mapping[str, Any]


def find_resumed(trainer: TrainerConfig) -> tuple[Saved | None, list[Problem]]:
    """Return what ``trainer.resume`` names; None where that is nothing, or can't be gone on from, as the problems say.

    Files are compared with their manifest; of large ones only how long they are.
    """
    if trainer.resume is None:
        return None, []
    if not trainer.resume.strip():
        reason = "it names no checkpoint"
        remedy = f"Write {LATEST}, {AUTO} or a folder; null begins a run anew"
        return None, [Problem(RESUME, trainer.resume, reason, remedy)]
    try:
        if trainer.resume in (AUTO, LATEST):
            newest = saved.newest(Path(trainer.output_dir).expanduser() / CHECKPOINTS, quick=True)
            if newest is None:
                return None, [nothing_to_resume(trainer)] if trainer.resume == LATEST else []
            return _read(newest[1]), []
        folder = Path(trainer.resume).expanduser()
        problem = _no_checkpoint(trainer.resume, folder)
        if problem is not None:
            return None, [problem]
        saved.require_whole(folder, quick=True)
        return _read(folder), []
    except OSError as error:
        reason, remedy = f"{error.filename}: can't be read ({error.strerror})", "Mend that"
    except DataError as error:
        reason, remedy = str(error), "Without trainer.resume the run begins anew"
    return None, [Problem(RESUME, trainer.resume, reason, remedy)]


def _no_checkpoint(named: str, folder: Path) -> Problem | None:
    """Return why ``folder`` is none; None where it looks like one."""
    if not folder.is_dir():
        remedy = f"Write an existing one, or {LATEST} or {AUTO} for the newest in {KEY}"
        return Problem(RESUME, named, "there is no such checkpoint folder", remedy)
    if not any(folder.iterdir()):
        return Problem(RESUME, named, "the folder is empty", "Write a folder that holds a checkpoint")
    if (folder / STATE).exists():
        return None
    inside = checkpoints_in(folder)
    remedy = f"Write {inside[-1][1]}" if inside else f"Write the path of a folder step_… that holds a {STATE}"
    return Problem(RESUME, named, "it is not a finished checkpoint", remedy)


def _read(folder: Path) -> Saved:
    state = saved.read_state(folder)
    return Saved(state["step"], folder, state["facts"])


def nothing_to_resume(trainer: TrainerConfig) -> Problem:
    """Return the problem that there is no checkpoint, with what else was found."""
    folder = Path(trainer.output_dir).expanduser()
    rows = read_rows(folder / METRICS_FILE)
    there = [f"{len(rows)} steps in {METRICS_FILE}"] if rows else []
    there += [f"a trained model in {FINAL_FOLDER}/"] if (folder / FINAL_FOLDER).is_dir() else []
    found = f"; there are {' and '.join(there)}" if there else ""
    reason = f"there is no checkpoint in {folder / CHECKPOINTS}{found}"
    aside = ", and what is there is moved aside" if there else ""
    remedy = f"Name another {KEY}, or leave it out (or write {AUTO}) to begin anew{aside}"
    return Problem(RESUME, trainer.resume, reason, remedy)
