"""Checkpoints: folders that are whole or not there, the newest whole one found, the last few kept.

A checkpoint holds sharded tensors (written by all ranks through ``torch.distributed.checkpoint``, readable on another
number of ranks) and one JSON file of everything else. That file is written last, and only then is the folder renamed to
its final name: a folder without it was never finished.
"""

from __future__ import annotations

import random
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from tandem.base.errors import DataError
from tandem.base.folders import flush, flush_tree
from tandem.columns import plain_json

_STATE = "state.json"
_TENSORS = "tensors"
_FORMAT = "tandem-checkpoint/1"
_OTHER_CONTENT = ("Missing key", "ize mismatch")
"""What torch says where a whole checkpoint is of other tensors than those asked for."""
_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint at ``path``, taken after training step ``step``."""

    path: Path
    step: int

    def read(self) -> dict[str, Any]:
        """The JSON part, as given to ``save``."""
        facts: dict[str, Any] = _read(self.path)["facts"]
        return facts

    def load_tensors(self, tensors: dict[str, Any]) -> None:
        """Fill ``tensors``, built like those saved (say ``{"actor": engine.state_dict()}``), in place.

        Numbers and strings in it are replaced; every rank calls this with its own shards. Raises ``DataError`` where
        the checkpoint lacks one of them, has it in another shape, or can't be read.
        """
        try:
            with _single_process_is_meant():
                load_sharded(tensors, checkpoint_id=self.path / _TENSORS, no_dist=not _distributed())
        except CheckpointException as error:
            reason = next(iter(error.failures.values()))[0]
            said = (str(reason).splitlines() or [type(reason).__name__])[0]
            if not any(sign in said for sign in _OTHER_CONTENT):
                raise DataError(f"{self.path / _TENSORS} can't be read ({said}); take an older checkpoint") from error
            raise DataError(
                f"{self.path} holds other weights than this config trains ({said}): resume with the model, the LoRA "
                "rank and the KL of the saved run, or start a new run from its model"
            ) from error

    def restore_random_state(self) -> None:
        """Set the global generators of torch, Python and numpy to where this checkpoint found them on rank 0."""
        state = _read(self.path)["random"]
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
        random.setstate(state["python"])
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def save(
    root: Path,
    step: int,
    *,
    tensors: dict[str, Any],
    facts: Mapping[str, Any],
    keep: int,
    parts: Mapping[str, Path] = MappingProxyType({}),
) -> Checkpoint:
    """Write ``root/step_<step>``; afterwards only the ``keep`` newest checkpoints stay.

    ``tensors`` is a nested dict of (sharded) tensors, numbers and strings, ``facts`` anything that JSON holds. The
    folders ``parts`` are moved into the checkpoint, each under its name, before that is finished. Every
    rank calls this. The random state of rank 0 goes with it. A killed process leaves at most a hidden partial folder,
    which the next ``save`` clears away.
    """
    target, scratch = root / f"step_{step:08d}", root / f".step_{step:08d}.partial"
    if _first_rank():
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(".step_*.partial"):
            shutil.rmtree(leftover)
        scratch.mkdir()
    _barrier()
    with _single_process_is_meant():
        save_sharded(tensors, checkpoint_id=scratch / _TENSORS, no_dist=not _distributed())
    if _first_rank():
        for name, folder in parts.items():
            folder.rename(scratch / name)
        flush_tree(scratch)
        document = {"format": _FORMAT, "step": step, "facts": dict(facts), "random": _random_state()}
        (scratch / _STATE).write_text(plain_json.dumps(document, "the checkpoint"))
        flush(scratch / _STATE)
        flush(scratch)
        if target.exists():
            shutil.rmtree(target)
        scratch.rename(target)
        flush(root)
        for old in _finished(root)[:-keep]:
            shutil.rmtree(old.path)
    _barrier()
    return Checkpoint(target, step)


def set_aside(root: Path, after: int) -> None:
    """Move the checkpoints of steps beyond ``after`` to a folder beside ``root``, named ``ROOT.1``, ``ROOT.2`` ...

    They are of an earlier run: one that begins in the same folder, or goes on from an earlier step, would take them for
    its own newest.
    """
    later = [checkpoint.path for checkpoint in _finished(root) if checkpoint.step > after]
    if not later:
        return
    number = 1
    while (target := root.with_name(f"{root.name}.{number}")).exists():
        number += 1
    target.mkdir()
    for path in later:
        path.rename(target / path.name)


def latest(root: Path) -> Checkpoint | None:
    """The newest finished checkpoint under ``root``; None if there is none."""
    finished = _finished(root)
    return finished[-1] if finished else None


def open_checkpoint(path: Path) -> Checkpoint:
    """The finished checkpoint in the folder ``path``; raises ``DataError`` if there is none."""
    if not (path / _STATE).is_file():
        inside = latest(path)
        hint = f"write {inside.path}" if inside else "write the path of a folder step_… that holds a state.json"
        raise DataError(f"{path} is not a finished checkpoint: {hint}")
    step: int = _read(path)["step"]
    return Checkpoint(path, step)


def _finished(root: Path) -> list[Checkpoint]:
    """All finished checkpoints, oldest first."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / _STATE).is_file():
            try:
                _read(path)
            except DataError:
                continue
            found.append(Checkpoint(path, int(match[1])))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = plain_json.loads((path / _STATE).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path / _STATE}: not a whole checkpoint ({error}); take an older one") from error
    if not isinstance(document, dict) or "format" not in document or document["format"] != _FORMAT:
        raise DataError(f"{path / _STATE}: not of the format {_FORMAT}")
    return document


def _random_state() -> dict[str, Any]:
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": bytes(torch.get_rng_state().numpy()).hex(),
        "python": random.getstate(),
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """torch warns of a single process at every save and load."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in a single process.*")
        yield


def _distributed() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _first_rank() -> bool:
    return not _distributed() or dist.get_rank() == 0


def _barrier() -> None:
    if _distributed():
        dist.barrier()
