"""Folders for the temporary files of scoring: gone with who made them, or cleared by the next run.

A lock on the folder says that its owner lives; the kernel ends the lock with the owner, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

SCORER, PROGRAM = "tandem-scorer-", "tandem-program-"
"""What their names begin with: of a scoring process, and of a program that one runs."""

_NEW_S = 60.0  # a folder this young may be made just now, and not locked yet


class TemporaryPlace:
    """A folder that lives as long as this object holds it."""

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody clears it but its owner
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove the folder and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)


def clear_left_over() -> None:
    """Remove this user's folders whose owners are gone: killed while a scorer could not be stopped otherwise."""
    for path in Path(tempfile.gettempdir()).glob("tandem-*"):
        if not path.name.startswith((SCORER, PROGRAM)):
            continue
        with contextlib.suppress(OSError):  # gone by now, another user's, or held
            status = path.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _NEW_S:
                _remove_unheld(path)


def _remove_unheld(path: Path) -> None:
    """Remove a folder that nobody holds. Raises ``OSError`` where one does, or it is no folder."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)
