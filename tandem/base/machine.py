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
