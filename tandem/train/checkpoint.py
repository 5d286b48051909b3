"""Checkpoints: folders that are whole or not there, the newest whole one found, the last few kept.

A checkpoint holds sharded tensors (written by all ranks, readable on another number of ranks), one JSON file of
everything else, and a manifest with the checksum of every file. The manifest is written last, and only then is the
folder renamed to its final name: one that lacks something was damaged later.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from tandem.base.errors import DataError, TandemError, WriteError
from tandem.base.folders import flush, flush_tree, replace_folder, write_error
from tandem.base.manifest import Digest, write_manifest
from tandem.columns import plain_json
from tandem.train import saved
from tandem.train.best import best_checkpoint
from tandem.train.saved import STATE, TENSORS
from tandem.train.tensor_files import OtherContentError, read_tensors, write_tensors

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint at ``path``, taken after training step ``step``; every file of it was checked by who found it."""

    path: Path
    step: int

    def read(self) -> dict[str, Any]:
        """Return the JSON part, as given to ``save``."""
        facts: dict[str, Any] = saved.read_state(self.path)["facts"]
        return facts

    def load_tensors(self, tensors: dict[str, Any]) -> None:
        """Fill ``tensors``, built like those saved (say ``{"actor": engine.state_dict()}``), in place.

        Numbers and strings in it are replaced; every rank calls this with its own shards. Raises ``DataError`` where
        the checkpoint lacks one of them, has it in another shape, or can't be read.
        """
        try:
            read_tensors(self.path / TENSORS, tensors)
        except OtherContentError as error:
            raise DataError(
                f"{self.path} holds other weights than this config trains ({error}): resume with the model, the LoRA "
                "rank and the KL of the saved run, or start a new run from its model"
            ) from error
        except DataError as error:
            raise DataError(f"{error}; take an older checkpoint") from error

    def restore_random_state(self) -> None:
        """Set the global generators of torch, Python and numpy to where this checkpoint found them on rank 0."""
        state = saved.read_state(self.path)["random"]
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
    """Write ``root/step_<step>``; afterwards only the ``keep`` newest checkpoints stay, and the one that
    a note there calls the best.

    ``tensors`` is a nested dict of (sharded) tensors, numbers and strings, ``facts`` anything that JSON holds. The
    folders ``parts`` are moved into the checkpoint, each under its name, before that is finished. Every
    rank calls this. The random state of rank 0 goes with it. A killed process leaves at most a hidden partial folder,
    which the next ``save`` clears away. Raises ``WriteError`` on all ranks where one can't write.
    """
    target, scratch = root / f"step_{step:08d}", root / f".step_{step:08d}.partial"

    def begin() -> None:
        (scratch / TENSORS).mkdir(parents=True)

    def write() -> dict[str, Digest]:
        files = write_tensors(scratch / TENSORS, tensors, *_rank_and_world())
        for file in files:
            flush(file)
        return {f"{TENSORS}/{file.name}": Digest.of(file) for file in files}

    def finish() -> None:
        for name, folder in parts.items():
            folder.rename(scratch / name)
        document = {"format": saved.FORMAT, "step": step, "facts": dict(facts), "random": _random_state()}
        (scratch / STATE).write_text(plain_json.dumps(document, "the checkpoint"))
        write_manifest(scratch, {name: digest for part in written for name, digest in part.items()})
        flush_tree(scratch)
        replace_folder(scratch, target)
        flush(root)
        best = best_checkpoint(root)
        for _, old in saved.checkpoints_in(root)[:-keep]:
            if best is None or old != best.path:
                shutil.rmtree(old)

    _on_first(lambda: _clear(root), root)
    _on_first(begin, scratch)
    written = _on_all(write, scratch)
    _on_first(finish, scratch)
    return Checkpoint(target, step)


def latest(root: Path) -> Checkpoint | None:
    """Return the newest checkpoint under ``root``; None if there is none. Raises ``DataError`` if it is damaged."""
    found = saved.newest(root)
    return None if found is None else Checkpoint(found[1], found[0])


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the finished checkpoint in the folder ``path``; raises ``DataError`` if there is none, or it is damaged."""
    if not (path / STATE).exists():
        inside = saved.checkpoints_in(path)
        hint = f"write {inside[-1][1]}" if inside else f"write the path of a folder step_… that holds a {STATE}"
        raise DataError(f"{path} is not a finished checkpoint: {hint}")
    saved.require_whole(path)
    step: int = saved.read_state(path)["step"]
    return Checkpoint(path, step)


def _random_state() -> dict[str, Any]:
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": bytes(torch.get_rng_state().numpy()).hex(),
        "python": random.getstate(),
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def _clear(root: Path) -> None:
    """Make ``root``, without what a killed process left in it."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".step_*.partial"):
        shutil.rmtree(leftover)


# --- ranks -----------------------------------------------------------------------------------------------------------


def _on_first(action: Callable[[], None], place: Path) -> None:
    """Run ``action`` on the first rank; all return once it is over, or raise what it raised."""
    _on_all(action if _rank_and_world()[0] == 0 else lambda: None, place)


def _on_all(action: Callable[[], T], place: Path) -> list[T]:
    """Run ``action`` on every rank; the results of all. What one raises, all raise, so that none waits for it."""
    result: T | None = None
    error: Exception | None = None
    try:
        result = action()
    except (OSError, SafetensorError) as caught:
        error = write_error(caught, place)
    except Exception as caught:
        error = caught
    if _rank_and_world()[1] > 1:
        return _agreed(result, error)
    if error is not None:
        raise error
    return [result]  # type: ignore[list-item]


def _agreed(result: T | None, error: Exception | None) -> list[T]:
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (result, None if error is None else f"{error}", isinstance(error, WriteError)))
    if error is not None:
        raise error
    for _, text, is_write in answers:
        if text is not None:
            raise (WriteError if is_write else TandemError)(text)
    return [found for found, _, _ in answers]


def _rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
