"""Modules made of the user's files, under names that any process can import.

A name holds the file's path (``tandem.base.user_files.scorers_2f686f6d65…``), so a process that was started elsewhere,
by ``multiprocessing`` with ``spawn`` for example, finds the code of what it unpickles.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

__path__: list[str] = []
"""Makes this module a package, whose modules only ``_Finder`` finds."""


def module_name(path: Path) -> str:
    """Return the name under which the file ``path`` is imported."""
    return f"{__name__}.{re.sub(r'[^0-9A-Za-z]', '_', path.stem)}_{str(path).encode().hex()}"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a file by the path in a module's name; its folder is importable from then on (last)."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of this package, None for any other."""
        package, _, name = fullname.rpartition(".")
        if package != __name__:
            return None
        file = Path(bytes.fromhex(name.rpartition("_")[2]).decode())
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        return importlib.util.spec_from_file_location(fullname, file)


sys.meta_path.append(_Finder())
