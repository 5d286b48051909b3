"""Sharding a model over ranks with ``fully_shard``."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tandem.models.causal_lm import CausalLM


def shard_layers(model: CausalLM, mesh: DeviceMesh) -> None:
    """Shard each decoder layer, and the rest (embedding, last norm, head) as one; gradients are summed over ranks.

    All are given back after each forward, the rest too: whoever writes into shards between two forwards, as an
    optimizer or a weight tag does, must find its change in the second.
    """
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the denominator divides, once
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, sharing its memory; an unsharded one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return ``shard`` as this rank's part of a tensor that is sharded as ``parameter`` is, sharing its memory."""
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def part_like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``whole``, which every rank has, cut as ``parameter`` is; an unsharded one as
    it is.
    """
    if not isinstance(parameter, DTensor):
        return whole.detach()
    whole = whole.detach().to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
