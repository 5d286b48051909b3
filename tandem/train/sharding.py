"""Sharding a model over ranks with ``fully_shard``."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tandem.base.errors import ContractError
from tandem.models.causal_lm import CausalLM


def shard_layers(model: CausalLM, mesh: DeviceMesh) -> None:
    """Shard each decoder layer, and the rest (embedding, last norm, head) as one; gradients are summed over ranks."""
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    root = fully_shard(model, mesh=mesh)
    for module in root.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)  # the denominator divides, once


def decoder_layers(model: CausalLM) -> nn.ModuleList:
    """The list of transformer layers, whatever the architecture calls it."""
    count = model.model.config.num_hidden_layers
    for module in model.model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ContractError(
        f"{type(model.model).__name__} has no list of {count} layers: this architecture can't be sharded"
    )


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, sharing its memory; an unsharded one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor, gathered from all ranks; an unsharded one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
