"""The folders of checkpoints, without what is in their tensors: which there are, whether they are whole, what they say.

A folder gets its name ``step_N`` once it is complete, so one that lacks something, or has it otherwise than its
manifest says, is damaged. No other is taken in its place unasked: it would be another run that goes on. No torch here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.base.errors import DataError, sentences
from tandem.base.manifest import MANIFEST, DamagedError, verify
from tandem.base.regular import regular
from tandem.base.run_folder import step_of
from tandem.columns import plain_json

STATE = "state.json"
TENSORS = "tensors"
FORMAT = "tandem-checkpoint/2"
_PICKLES = "tandem-checkpoint/1"


def checkpoints_in(root: Path) -> list[tuple[int, Path]]:
    """Step and folder of each checkpoint under ``root``, oldest first, whole or not.

    Raises ``DataError`` where ``root`` can't be read.
    """
    try:
        found = [(step_of(path), path) for path in root.iterdir()] if root.exists() else []
    except OSError as error:
        raise DataError(f"{root}: can't be read ({error.strerror or error}); what is in it is not known") from error
    return sorted((step, path) for step, path in found if step is not None)


def newest(root: Path, *, quick: bool = False) -> tuple[int, Path] | None:
    """Step and folder of the newest checkpoint under ``root``, checked as ``require_whole`` does; None: there is none.

    Raises ``DataError`` where the newest is damaged, with the file and what may be taken instead.
    """
    found = checkpoints_in(root)
    if not found:
        return None
    step, path = found.pop()
    try:
        require_whole(path, quick=quick)
    except DataError as error:
        raise DataError(sentences(error, f"It is of the newest checkpoint: {_instead(found, step, quick)}")) from error
    return step, path


def require_whole(path: Path, *, quick: bool = False) -> None:
    """Read all of the checkpoint in ``path``; ``quick``: of its tensors only how long they are.

    Raises ``DataError`` that names the first file that isn't as written.
    """
    if not (path / MANIFEST).exists() and (path / STATE).is_file():
        read_state(path)  # one of an older format says so
    verify(path, quick=quick)
    read_state(path)


def read_state(path: Path) -> dict[str, Any]:
    """Return what ``state.json`` says. Raises ``DataError``."""
    file = path / STATE
    try:
        document = plain_json.loads(regular(file).read_bytes())
    except OSError as error:
        raise DamagedError(file, f"can't be read ({error.strerror or error})") from error
    except ValueError as error:
        raise DamagedError(file, f"is damaged: not a whole document ({error})") from error
    written = document.get("format") if isinstance(document, dict) else None
    if written == _PICKLES:
        raise DataError(
            f"{path}: a checkpoint of the format {_PICKLES}, whose tensors come with a pickle, which is never read. "
            f"Start a new run from its model: actor_rollout_ref.model.path={path / 'model'}"
        )
    if written != FORMAT:
        raise DamagedError(file, f"not of the format {FORMAT}")
    assert isinstance(document, dict)
    return document


def _instead(older: list[tuple[int, Path]], passed: int, quick: bool) -> str:
    """Return what to write where the checkpoint of step ``passed`` is damaged."""
    for step, path in reversed(older):
        try:
            require_whole(path, quick=quick)
        except DataError:
            continue
        aside = f"that of step {passed} is then set aside"
        return f"restore that file, or go on from step {step} with trainer.resume={path} ({aside})"
    return "restore that file; there is no older one that is whole"
