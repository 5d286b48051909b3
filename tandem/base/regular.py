"""Paths that no file lies at: reading a pipe or a device may wait for ever, or never come to an end."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_MADE_UP = ("/proc", "/sys")
"""Where the kernel makes up what is read, at the moment when it is."""


def irregular(path: Path) -> str | None:
    """Return what lies at ``path`` in place of a file or folder; None for these, and where nothing is."""
    try:
        mode, place = path.stat().st_mode, path.resolve()
    except (OSError, RuntimeError, ValueError):
        return None  # whoever reads it says what is wrong
    if any(place.is_relative_to(root) for root in _MADE_UP):
        return "made up by the kernel"
    return next((name for is_kind, name in _KINDS if is_kind(mode)), None)


def irregular_in(folder: Path) -> str | None:
    """Return which entry of ``folder`` is neither a file nor a folder, and what it is; None where none is."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return None  # whoever reads it says what is wrong
    for path in entries:
        if (kind := irregular(path)) is not None:
            return f"{path.name} is {kind}, and no file"
    return None


def regular(path: Path) -> Path:
    """Return ``path`` itself. Raises ``OSError`` for what is there and no file, before anything waits for it."""
    if (kind := irregular(path)) is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, and no file", str(path))
    return path
