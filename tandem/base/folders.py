"""Folders that appear whole or not at all, and disks on which nothing more appears."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.base.errors import WriteError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ROOM_TEXTS = (*map(os.strerror, _NO_ROOM), "file write failed", "unexpected pos")  # the last two are PyTorch's


def means_no_room(error: BaseException) -> bool:
    """Return whether ``error`` comes of a full disk, a quota or a limit of sizes: libraries have their own errors for
    it.
    """
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return True
    if any(text in str(error) for text in _NO_ROOM_TEXTS):
        return True
    return error.__cause__ is not None and means_no_room(error.__cause__)


def write_error(error: Exception, place: Path) -> WriteError:
    """Return an error that says in one line which file can't be written (the one ``error`` names, else ``place``) and
    why.
    """
    if isinstance(error, shutil.Error):
        error = _first_of(error)
    name = error.filename if isinstance(error, OSError) and error.filename else place
    said = (str(error).splitlines() or [type(error).__name__])[0]
    reason = error.strerror if isinstance(error, OSError) and error.strerror else said
    if means_no_room(error):
        return WriteError(f"{name}: no room is left to write to ({reason}: a full disk, a quota, a limit of sizes)")
    return WriteError(f"{name}: can't be written ({reason})")


def _first_of(error: shutil.Error) -> OSError:
    """Return the first failure of a copied folder, which are kept as (source, target, words)."""
    failures = error.args[0] if error.args else ""
    words = str(failures[0][2] if isinstance(failures, list) and failures else failures)
    number = re.match(r"\[Errno (\d+)\]", words)
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(words)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a scratch folder beside ``target`` to write into; renamed to ``target`` at the end, removed on an error.

    Files reach the disk before the rename, so that not even a power cut leaves a half-written ``target``. A folder that
    was there is replaced. What a killed writer of the same ``target`` left beside it is removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch, held = _scratch_beside(target)
    try:
        yield scratch
        scratch.chmod(0o755)  # mkdtemp's folders are for their owner only
        flush_tree(scratch)
        replace_folder(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(held)
    flush(target.parent)


def _scratch_beside(target: Path) -> tuple[Path, int]:
    """Return a new folder and the handle that holds it, once the folders that nobody holds any more are gone."""
    prefix = f".{target.name}.partial-"
    for left in target.parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):
            remove_unheld(left)
    while True:
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=prefix))
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            return scratch, hold(scratch)  # else another writer took it for one left behind before it was held


def hold(folder: Path) -> int:
    """Return a handle that locks ``folder`` while it is open; the kernel closes it with the process.

    Raises ``FileNotFoundError`` or ``BlockingIOError`` where another process removes the folder just now.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.lstat()
    except (FileNotFoundError, BlockingIOError):
        os.close(handle)
        raise
    except OSError:
        pass  # a file system without locks: then nobody removes it but its owner
    return handle


def remove_unheld(folder: Path) -> None:
    """Remove a folder that nobody holds. Raises ``OSError`` where one does, or it is no folder."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


def replace_folder(new: Path, target: Path) -> None:
    """Rename ``new`` to ``target``; what was there steps aside first, since a rename replaces no folder with files."""
    if not target.exists():
        os.rename(new, target)
        return
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.replaced-"))
    os.rename(target, aside / "old")
    os.rename(new, target)
    shutil.rmtree(aside)


def flush_tree(folder: Path) -> None:
    """Apply ``flush`` to every file and folder under ``folder``, itself included."""
    for parent, _, names in os.walk(folder):
        for name in names:
            flush(Path(parent) / name)
        flush(Path(parent))


def flush(path: Path) -> None:
    """Wait until the file, or the list of names of the folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
