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


def available_memory() -> int | None:
    """Return the bytes that programs can still take without swapping; None where the system doesn't say."""
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    group = _left_in_group(Path("/sys/fs/cgroup"))
    return free if group is None else min(free, group)


def _left_in_group(folder: Path) -> int | None:
    """Return the bytes that the group of processes in which this one runs may still take; None without a limit."""
    try:
        most = int((folder / "memory.max").read_text("utf-8"))
        taken = int((folder / "memory.current").read_text("utf-8"))
        lines = (folder / "memory.stat").read_text("utf-8").splitlines()
        cached = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return max(0, most - taken + cached)


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
