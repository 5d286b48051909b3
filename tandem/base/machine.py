"""What this machine has, as far as the system says it. Importing this costs nothing."""

from __future__ import annotations

import os
from pathlib import Path


def physical_memory() -> int | None:
    """Return the memory of this machine in bytes; None where the system doesn't say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def has_accelerator() -> bool:
    """Return whether the system shows a device of NVIDIA's or AMD's, which a run would take."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def process_lives(pid: int) -> bool:
    """Return whether a process of this machine has the id ``pid``, whoever's it is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
