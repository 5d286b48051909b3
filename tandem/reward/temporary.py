"""Folders for the temporary files of scoring: gone with who made them, or cleared by the next run.

A lock on the folder says that its owner lives; the kernel ends the lock with the owner, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from tandem.base.folders import hold, remove_unheld

SCORER, PROGRAM = "tandem-scorer-", "tandem-program-"
"""What their names begin with: of a scoring process, and of a program that one runs."""

_NEW_S = 60.0  # a folder this young may be made just now, and not locked yet


class TemporaryPlace:
    """A folder that lives as long as this object holds it."""

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._handle = hold(self.path)

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
                remove_unheld(path)
