"""What models can compute on, by the name that torch has for it. Importing this costs no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.base.errors import TandemError


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device. ``collectives``: the backend of ``torch.distributed`` among its devices. ``visible``: the
    environment variable with which a process is shown some of them, and numbers those from 0; None: it sees all."""

    name: str
    collectives: str
    visible: str | None = None


CPU, CUDA = "cpu", "cuda"

_CUDA_TOO = ("gpu", "nvidia", "nccl")
"""What people call devices of the kind ``cuda``."""

_KINDS = {CPU: DeviceKind(CPU, "gloo"), CUDA: DeviceKind(CUDA, "nccl", "CUDA_VISIBLE_DEVICES")}


def register_device(kind: DeviceKind) -> None:
    """Let ``runtime.device`` name ``kind``: a device that a plugin brings to torch. Raises for a name that is taken."""
    if _KINDS.setdefault(kind.name, kind) != kind:
        raise TandemError(f"device {kind.name!r} is registered already, as another kind")


def device_kind(name: str) -> DeviceKind | None:
    """Return the kind of that name; None for an unknown one."""
    return _KINDS.get(name)


def known_devices(name: str) -> str:
    """Say what to write instead of the unknown ``name``."""
    if name.lower() in _CUDA_TOO:
        return f"Write {CUDA}, or auto for what there is"
    close = difflib.get_close_matches(name.lower(), _KINDS, n=1)
    return f"Write {close[0]}" if close else f"Write auto, {', '.join(_KINDS)}, or import what brings it with plugins"


def named_device(name: str, index: int) -> str:
    """Return the device of that kind with the number ``index``, as torch writes it; there is one CPU only."""
    return CPU if name == CPU else f"{name}:{index}"


def shown_alone(device: str, environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return ``device`` as a process calls it that sees no other of its kind, and the environment for that.

    ``environment`` is this process's: it may see only some devices itself. A kind without such a variable is as it was.
    """
    name, _, index = device.partition(":")
    kind = device_kind(name)
    if kind is None or kind.visible is None or not index:
        return device, {}
    seen = environment.get(kind.visible)
    return f"{name}:0", {kind.visible: index if seen is None else seen.split(",")[int(index)].strip()}
