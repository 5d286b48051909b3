"""The folder of a run: one owner at a time, nothing in it replaced that a run did not write, nothing deleted.

A run writes under the names of ``WRITTEN``, and notes in ``.tandem/`` that it does. A later run moves all of that
together to ``NAME.1`` (``.2`` ...). What has such a name and is of no run is the user's: the run is refused. A run that
goes on from a checkpoint renames what it would replace, with one number for all of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from tandem.base.errors import ConfigError, Problem, TandemError, WriteError
from tandem.base.folders import write_error
from tandem.base.machine import process_lives

CONFIG_FILE, METRICS_FILE, ROLLOUTS_FILE = "config.yaml", "metrics.jsonl", "rollouts.jsonl"
ABOUT_FILE = "about.json"
SAMPLES = "samples"
REPORT_FILE, TRACE_FILE, TENSORBOARD, TRACKERS_FOLDER = "report.html", "trace.json", "tensorboard", "trackers"
CHECKPOINTS, FINAL_FOLDER, CRITIC_FOLDER = "checkpoints", "final", "critic"
WRITTEN = (
    *(CONFIG_FILE, ABOUT_FILE, METRICS_FILE, ROLLOUTS_FILE, SAMPLES, REPORT_FILE, TRACE_FILE, TENSORBOARD),
    *(TRACKERS_FOLDER, CHECKPOINTS, FINAL_FOLDER, CRITIC_FOLDER),
)
"""Names in the folder that are a run's."""

_REPLACED = (FINAL_FOLDER, CRITIC_FOLDER)
_REWRITTEN = (CONFIG_FILE, ABOUT_FILE, METRICS_FILE, ROLLOUTS_FILE, REPORT_FILE)
_STEP = re.compile(r"step_(\d+)")
_SAMPLES_PART = re.compile(r"(\w+)-(\d+)\.parquet")
_HIDDEN, _LOCK, _OWNER, _RECORD = ".tandem", "lock", "owner.json", "run.json"
_SCRATCH = re.compile(r"\.+([\w-]+(?:\.\w+)?)\.(partial|replaced)\b.*")
CONTROL_FILE = f"{_HIDDEN}/control.json"
"""Where a running run says how it can be asked."""

_PARTS = ("model", "adapter", CRITIC_FOLDER, "reference")
KEY = "trainer.output_dir"


# --- one owner -------------------------------------------------------------------------------------------------------


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Own ``folder``, which is made if it isn't there, as long as the block lasts; a killed process owns nothing.

    Raises ``ConfigError`` that names the owner where another process owns it, ``WriteError`` where it can't be made.
    """
    hidden = folder / _HIDDEN
    lock = FileLock(hidden / _LOCK)
    try:
        hidden.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        reason = f"another run writes into this folder: {_owner(hidden)}"
        remedy = "Wait for its end, end it, or write another folder"
        raise ConfigError([Problem(KEY, str(folder), reason, remedy)]) from None
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now().isoformat(" ", "seconds")}
        with suppress(OSError):  # of a run that was killed
            (folder / CONTROL_FILE).unlink()
        with suppress(OSError):  # for the words of those who look only
            (hidden / _OWNER).write_text(json.dumps(who))
        yield
    finally:
        with suppress(OSError):
            (hidden / _OWNER).unlink()
        lock.release()


def _unwritable(folder: Path, error: OSError) -> WriteError:
    return WriteError(f"{KEY} = {str(folder)!r} can't be used ({write_error(error, folder)}): choose another folder")


def _owner(hidden: Path) -> str:
    try:
        who = json.loads((hidden / _OWNER).read_text())
        return f"process {who['pid']} on {who['host']}, since {who['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that hasn't said who it is yet"


def owner(folder: Path) -> str | None:
    """Return who owns ``folder`` now, in words; None where nobody on this machine does."""
    try:
        who = json.loads((folder / _HIDDEN / _OWNER).read_text())
        lives = who["host"] == socket.gethostname() and process_lives(int(who["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return _owner(folder / _HIDDEN) if lives else None


# --- beginning -------------------------------------------------------------------------------------------------------


def begin(folder: Path, *, goes_on_after: int | None = None, to: int | None = None) -> list[str]:
    """Make ``folder`` ready for a run, whose owner the caller is; what was moved for it, in whole sentences.

    ``goes_on_after``: the step of the checkpoint in this folder that the run continues from; None: a new run. ``to`` is
    the run's last step. Raises ``ConfigError`` where a file of the user's is in the way, ``WriteError``.
    """
    try:
        (folder / _HIDDEN).mkdir(parents=True, exist_ok=True)
        notices = _finish_move(folder)
        if _record(folder) is not None:
            _clear_leftovers(folder)
        notices += _move_old(folder) if goes_on_after is None else _step_aside(folder, goes_on_after, to)
        strange = in_the_way(folder) if goes_on_after is None else []
        if strange:
            raise ConfigError([user_files(folder, strange)])
        _write_record(folder, {})
    except OSError as error:
        raise _unwritable(folder, error) from error
    return notices


def in_the_way(folder: Path) -> list[str]:
    """Return the names in ``folder`` that a new run would write, and that no run has written."""
    if _record(folder) is not None:
        return []
    return [name for name in WRITTEN if os.path.lexists(folder / name)]


def user_files(folder: Path, names: Sequence[str]) -> Problem:
    """Return an error for ``names`` in ``folder`` that belong to no run."""
    reason = f"{', '.join(names)} in it would be replaced, and no run has written that"
    return Problem(KEY, str(folder), reason, f"Write a folder of its own for the run, such as {folder / 'run'}")


def step_of(path: Path) -> int | None:
    """Return the step of the checkpoint that has this name; None for another name."""
    match = _STEP.fullmatch(path.name)
    return None if match is None else int(match[1])


def part_of_samples(name: str) -> tuple[str, int] | None:
    """Return kind and step of the file of samples that has this name; None for another name."""
    match = _SAMPLES_PART.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def is_of_a_run(name: str) -> bool:
    """Return whether a run writes under this name, or renames something to it."""
    stem, _, suffix = name.partition(".")
    return name in WRITTEN or any(
        Path(written).stem == stem and re.fullmatch(rf"\d+{re.escape(Path(written).suffix)}", suffix)
        for written in WRITTEN
    )


def _of_a_run(folder: Path) -> list[str]:
    """Return everything in ``folder`` that a run wrote, with what it renamed."""
    return sorted(path.name for path in folder.iterdir() if is_of_a_run(path.name))


def _move_old(folder: Path) -> list[str]:
    """Move all of an earlier run to a folder beside this one; into this one where there can be none beside it."""
    names = _of_a_run(folder) if _record(folder) is not None else []
    if not names:
        return []
    target = _fresh(folder)
    _write_record(folder, {"moves_to": str(target)})
    return _move(folder, target)


def _move(folder: Path, target: Path) -> list[str]:
    for name in _of_a_run(folder):
        os.rename(folder / name, target / name)
    (target / _HIDDEN).mkdir(exist_ok=True)
    _write_record(target, {})
    (folder / _HIDDEN / _RECORD).unlink()
    return [f"the earlier run in {folder} was moved to {target}"]


def _finish_move(folder: Path) -> list[str]:
    """Go on with a move that a kill has cut in two."""
    target = (_record(folder) or {}).get("moves_to")
    return _move(folder, Path(target)) if target and Path(target).is_dir() else []


def _fresh(folder: Path) -> Path:
    """Return a new folder with the first number that is free."""
    for place in (folder.resolve().parent, folder.resolve()):
        number = 1
        while (target := place / f"{folder.resolve().name}.{number}").exists():
            number += 1
        with suppress(OSError):
            target.mkdir()
            if target.stat().st_dev == folder.stat().st_dev:  # else a rename can't go there
                return target
            target.rmdir()
    raise TandemError(f"{folder} has an earlier run, and there is no place to move it to: write another {KEY}")


def _step_aside(folder: Path, step: int, last: int | None) -> list[str]:
    """Rename what a run from ``step`` on would replace: checkpoints of later steps, and the model of the run so far."""
    checkpoints = folder / CHECKPOINTS
    later = [path for path in checkpoints.iterdir() if (step_of(path) or 0) > step] if checkpoints.is_dir() else []
    replaced = [name for name in _REPLACED if (folder / name).exists()] if later or step != last else []
    if not later and not replaced:
        return []
    number = 1
    while any((folder / _numbered(name, number)).exists() for name in (*_REPLACED, *_REWRITTEN, CHECKPOINTS, SAMPLES)):
        number += 1
    for name in _REWRITTEN:
        if (folder / name).exists():
            shutil.copyfile(folder / name, folder / _numbered(name, number))
    for name in replaced:
        os.rename(folder / name, folder / _numbered(name, number))
    samples = _later_samples(folder, step)
    for name, paths in ((CHECKPOINTS, later), (SAMPLES, samples)):
        if paths:
            aside = folder / _numbered(name, number)
            aside.mkdir()
            for path in paths:
                os.rename(path, aside / path.name)
    moved = [*replaced, *([CHECKPOINTS] if later else []), *([SAMPLES] if samples else [])]
    kept = [_numbered(name, number) for name in moved]
    return [f"what the run from step {step} on replaces is kept in {folder}: {', '.join(kept)}"]


def _later_samples(folder: Path, step: int) -> list[Path]:
    """Return the files of samples of steps after ``step``."""
    samples = folder / SAMPLES
    found = [(path, part_of_samples(path.name)) for path in samples.iterdir()] if samples.is_dir() else []
    return [path for path, part in found if part is not None and part[1] > step]


def _numbered(name: str, number: int) -> str:
    return f"{Path(name).stem}.{number}{Path(name).suffix}"


# --- what killed runs leave ------------------------------------------------------------------------------------------


def _clear_leftovers(folder: Path) -> None:
    """Remove what killed runs were writing, and bring back what one was replacing."""
    for place in (folder, folder / CHECKPOINTS):
        for path in place.iterdir() if place.is_dir() else ():
            match = _SCRATCH.fullmatch(path.name)
            if match is None or not _is_ours(match[1].removesuffix(".partial"), place == folder):
                continue
            whole = place / match[1]
            if match[2] == "replaced" and not whole.exists() and (path / "old").exists():
                os.rename(path / "old", whole)
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_ours(name: str, at_top: bool) -> bool:
    return name in WRITTEN if at_top else name in _PARTS or _STEP.fullmatch(name) is not None


# --- the note --------------------------------------------------------------------------------------------------------


def _record(folder: Path) -> dict[str, str] | None:
    """Return the note of the run whose folder this is; None where none was here. One that is cut counts: a run wrote
    it.
    """
    try:
        found = json.loads((folder / _HIDDEN / _RECORD).read_text())
        return found if isinstance(found, dict) else {}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        return {}


def _write_record(folder: Path, more: dict[str, str]) -> None:
    path = folder / _HIDDEN / _RECORD
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"format": "tandem-run/1", **more}))
    os.replace(beside, path)
