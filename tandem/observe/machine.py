"""What the machine has left while a run goes on, as metrics of a step."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_MB = 1_000_000


class MachineUse:
    """Memory, processor, disk and GPU, looked at when a step is logged; what can't be looked at is left out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = psutil.Process()
        psutil.cpu_percent()  # counts from here

    def measure(self) -> dict[str, float]:
        """Return ``system/*``: see docs/observe.md."""
        found: dict[str, float] = {}
        try:
            found["system/memory_mb"] = self._process.memory_info().rss / _MB
            found["system/memory_left_mb"] = psutil.virtual_memory().available / _MB
            found["system/cpu"] = psutil.cpu_percent() / 100
            found["system/disk_left_mb"] = psutil.disk_usage(str(self._folder)).free / _MB
        except (OSError, psutil.Error):  # of a container that hides /proc, a folder that is gone
            pass
        return found | _gpu()


def _gpu() -> dict[str, float]:
    """Return the memory of this process's GPU, where it uses one: its own at most so far, and what is left for all."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # None too while another thread imports it
    if cuda is None or not cuda.is_initialized():
        return {}
    left, _ = cuda.mem_get_info()
    return {"system/gpu_memory_mb": cuda.max_memory_allocated() / _MB, "system/gpu_memory_left_mb": left / _MB}
