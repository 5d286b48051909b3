"""What SGLang wants of packages that have no build for a CPU: stand-ins for torchvision, vLLM's kernels and its own.

``make engine-sglang`` puts this beside SGLang in the environment for the CPU, and nowhere else. A stand-in raises once
it is called. One kernel is really needed, the hash from which SGLang draws by a sample's seed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Absent:
    """An attribute of a package that is not there, of which only further attributes may be taken."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{self._name} is not there: this environment of SGLang is for text on a CPU")


class StandIns:
    """Finds the stand-ins, and makes their modules."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """The stand-in of that name; none for transformers, which would use the torchvision that it finds."""
        package = name.split(".")[0]
        wanted = package in ("torchvision", "sgl_kernel") or name in ("vllm", "vllm._custom_ops")
        if not wanted or _asked_by("transformers.utils.import_utils"):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module that has every public attribute."""
        module = ModuleType(spec.name)

        def attribute(name: str) -> Absent:
            if name.startswith("__"):
                raise AttributeError(name)
            return Absent(f"{spec.name}.{name}")

        module.__dict__["__getattr__"] = attribute
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give SGLang's kernels the one that is computed here."""
        if module.__name__ == "sgl_kernel":
            import torch

            kernel = "sgl_kernel::murmur_hash32_cpu"
            torch.library.define(kernel, "(Tensor seeds, Tensor positions, Tensor columns) -> Tensor")
            torch.library.impl(kernel, "CPU", murmur_hash32)


def murmur_hash32(seeds: Any, positions: Any, columns: Any) -> Any:
    """MurmurHash3 (x86, 32 bits, seed 0) of a row's seed and position and a column: (R,), (R,), (C,) to (R, C) int64.

    Numbers are held in int64, where a product wraps around and keeps its low 32 bits.
    """
    seeds, low = seeds.long()[:, None], 0xFFFFFFFF
    state = _mixed(0, seeds & low)
    state = _mixed(state, (seeds >> 32) & low)
    state = _mixed(state, positions.long()[:, None] & low)
    state = _mixed(state, columns.long()[None] & low) ^ 16  # bytes that were hashed
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & low
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & low
    return state ^ (state >> 16)


def _mixed(state: Any, block: Any) -> Any:
    low = 0xFFFFFFFF
    block = (_rotated((block * 0xCC9E2D51) & low, 15) * 0x1B873593) & low
    return (_rotated(state ^ block, 13) * 5 + 0xE6546B64) & low


def _rotated(number: Any, bits: int) -> Any:
    """32 bits, to the left."""
    return ((number << bits) | (number >> (32 - bits))) & 0xFFFFFFFF


def _asked_by(module: str) -> bool:
    """Whether a function of that module is looking for something."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


sys.meta_path.append(StandIns())
