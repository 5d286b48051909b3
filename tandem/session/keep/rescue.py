"""What becomes of trained weights that can't be written: they go where there is room, or it is said how to get them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from tandem.base.errors import WriteError, sentences
from tandem.base.folders import means_no_room, write_error
from tandem.base.interrupts import saved
from tandem.base.run_folder import CHECKPOINTS


@dataclass(frozen=True)
class Rescue:
    """The rescue of a model that ``write`` writes to a folder, after ``steps`` steps of the run in ``output_dir``.

    ``part`` names it where it is not all that the run trains. ``beside`` are the rescues of the other parts, which
    would be lost with it.
    """

    write: Callable[[Path], None]
    output_dir: Path
    steps: int
    part: str = ""
    beside: Sequence[Rescue] = ()

    @contextmanager
    def around(self, place: Path) -> Iterator[None]:
        """Guard writing to ``place``; where that fails the model is kept elsewhere, if there is any room.

        Raises ``WriteError``, one line: the file, what is wrong with it, and where the weights are.
        """
        try:
            yield
        except Exception as error:
            if not _is_of_the_disk(error):
                raise
            message = error if isinstance(error, WriteError) else write_error(error, place)
            raise WriteError(sentences(message, *(rescue._where() for rescue in (self, *self.beside)))) from error

    def _where(self) -> str:
        what = f"{self.part or 'model'} of step {self.steps}"
        checkpoint = self.output_dir / CHECKPOINTS / f"step_{self.steps:08d}"
        if checkpoint.is_dir():
            return f"The {what} is in {checkpoint}: tandem export {checkpoint} FOLDER writes it where there is room"
        tried: list[str] = []
        for folder in self._folders():
            try:
                self.write(folder)
                return f"The {what} was written to {folder} instead"
            except Exception as error:  # what is told is the first one
                tried.append(f"{folder.parent} ({(str(error).splitlines() or [type(error).__name__])[0]})")
        earlier = f"{saved()}: go on from there with --resume" if saved() else "no step before it was saved"
        return f"The {what} is lost, nor could it be written to {', '.join(tried) or 'any other place'}; {earlier}"

    def _folders(self) -> Iterator[Path]:
        """Yield where else it may go: names that nothing has."""
        for place in _places(self.output_dir):
            name = f"{self.output_dir.name}-{f'{self.part}-' if self.part else ''}step-{self.steps}"
            folder, number = place / name, 0
            while folder.exists():
                number += 1
                folder = place / f"{name}.{number}"
            yield folder


def _is_of_the_disk(error: Exception) -> bool:
    return isinstance(error, OSError | SafetensorError | WriteError) or means_no_room(error)


def _places(output_dir: Path) -> list[Path]:
    """Return the folders that may be on another disk, or have another quota: the nearest first."""
    found = [output_dir.parent, Path.cwd(), Path.home(), Path(tempfile.gettempdir())]
    return [place for place in dict.fromkeys(path.resolve() for path in found) if os.access(place, os.W_OK)]


@contextmanager
def unfinished_removed(root: Path) -> Iterator[None]:
    """Guard the writing of a checkpoint under ``root``: what is left of one that can't be finished makes room."""
    try:
        yield
    except Exception:
        for folder in root.glob(".*.partial") if root.is_dir() else ():
            shutil.rmtree(folder, ignore_errors=True)
        raise
