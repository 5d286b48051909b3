"""The device on which a model computes: found, counted, and held to what was planned."""

from __future__ import annotations

import torch
from torch import nn

from tandem.base.device_kinds import CPU, CUDA
from tandem.base.errors import TandemError
from tandem.base.machine import available_memory


def found_device(name: str) -> torch.device:
    """Return the device that ``name`` means in this process: ``auto`` is its first CUDA device, without one the CPU.

    Raises ``TandemError`` for one that this process doesn't see.
    """
    if name == "auto":
        name = CUDA if torch.cuda.is_available() else CPU
    device = torch.device(name)
    if device.type == CPU:
        return device
    index, count = device.index or 0, device_count(device.type)
    if index >= count:
        raise TandemError(f"this process should compute on {device.type}:{index}, and it sees {_devices(count, name)}")
    return torch.device(device.type, index)


def device_count(kind: str) -> int:
    """Count the devices of that kind that this process sees."""
    return int(torch.get_device_module(kind).device_count())


def memory_of(device: torch.device) -> int:
    """Return the bytes that ``device`` has, whoever holds them; it is no CPU."""
    return int(torch.get_device_module(device.type).mem_get_info(device)[1])


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that this process can still take on ``device``, what torch keeps for later included; None where
    the system doesn't say.
    """
    if device.type == CPU:
        return available_memory()
    module = torch.get_device_module(device.type)
    kept = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0]) + int(kept)


def give_back(device: torch.device) -> None:
    """Return memory that torch keeps for later to ``device``, so that other processes can have it."""
    if device.type != CPU:
        torch.get_device_module(device.type).empty_cache()


def require_on(model: nn.Module, device: torch.device | str, whose: str) -> None:
    """Raise ``TandemError`` unless all parameters and buffers lie on ``device``; ``whose`` model it is, in words.

    What is reserved for a role must be what it computes on: another device would do, too, and nobody would see it.
    """
    wanted = torch.device(device)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device != wanted:
            raise TandemError(
                f"{whose} was to compute on {wanted}, and its weight {name!r} is on {tensor.device}: leave it to "
                "Tandem to move the model"
            )


def _devices(count: int, name: str) -> str:
    kind = name.partition(":")[0]
    return f"no {kind} device" if count == 0 else f"{count} {kind} device{'s' * (count != 1)}"
