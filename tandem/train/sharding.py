"""Sharding a model over ranks with ``fully_shard``, on a mesh of one dimension or of two.

The ranks of one dimension are data-parallel: each has samples of its own. With two, those of a row of the second see
the same samples: with ``TENSOR`` they are one model among them, with ``SEQUENCE`` each computes some of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tandem.base.errors import DataError
from tandem.models.causal_lm import CausalLM
from tandem.models.layouts.shared_row import Share
from tandem.train.tensor_parallel import split_layers

DATA, TENSOR, SEQUENCE = "data", "tensor", "sequence"


@dataclass(frozen=True)
class Traffic:
    """What goes from rank to rank. ``gathered``: the dtype in which weights of a layer meet for its forward and
    backward; ``reduced``: that in which gradients are summed. Shards are as they are. ``once``: gradients are summed at
    the last micro-batch of several, which keeps whole ones on each rank until then.
    """

    gathered: torch.dtype = torch.float32
    reduced: torch.dtype = torch.float32
    once: bool = False

    def policy(self, *, layer: bool) -> MixedPrecisionPolicy:
        """Return what ``fully_shard`` is told of a layer, or of what is no layer: embedding, last norm and head are
        gathered as they are, since what they give is summed in float32.
        """
        low = layer and self.gathered != torch.float32
        return MixedPrecisionPolicy(
            param_dtype=self.gathered if low else None,
            reduce_dtype=None if self.reduced == torch.float32 and not low else self.reduced,
            cast_forward_inputs=False,
        )


PLAIN = Traffic()


def rank_mesh(device_type: str, ranks: int, tensor_parallel: int = 1, sequence_parallel: int = 1) -> DeviceMesh:
    """Return the mesh of ``ranks`` in this process group, of which ``tensor_parallel`` neighbours share a model, or
    ``sequence_parallel`` share their rows: one of the two is 1.
    """
    width, name = max((tensor_parallel, TENSOR), (sequence_parallel, SEQUENCE))
    if width == 1:
        return init_device_mesh(device_type, (ranks,))
    return init_device_mesh(device_type, (ranks // width, width), mesh_dim_names=(DATA, name))


def data_parallel(mesh: DeviceMesh) -> DeviceMesh:
    """Return the dimension of ``mesh`` whose ranks have samples of their own."""
    return mesh if mesh.ndim == 1 else mesh[DATA]


def flat(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of one dimension with the ranks of ``mesh``, which meet for it."""
    return mesh if mesh.ndim == 1 else rank_mesh(mesh.device_type, mesh.size())


def share_rows(model: CausalLM, mesh: DeviceMesh) -> None:
    """Have each rank of the one-dimensional ``mesh`` compute some tokens of each row. Raises ``DataError`` for a model
    that can't be run so.
    """
    ranks, config = mesh.size(), model.model.config.get_text_config()
    if model.route != "packed" or model.vision is not None:
        why = "in its layers more than attention knows them" if model.vision is None else "they may show images"
        raise DataError(
            f"documents of the model family {model.family!r} can't be shared by devices: {why}. Write "
            "ulysses_sequence_parallel_size: 1"
        )
    for what, name in (("attention heads", "num_attention_heads"), ("heads of keys and values", "num_key_value_heads")):
        count = getattr(config, name, None) or config.num_attention_heads
        if count % ranks:
            raise DataError(f"{count} {what} can't be shared by {ranks} devices: write another number of devices")
    model.share = Share(mesh.get_group(), mesh.get_local_rank(), ranks)


def groups_of(mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups that a sum over all ranks of ``mesh`` goes through, one after the other."""
    return () if mesh is None else tuple(mesh.get_all_groups())


def cuts_layers(mesh: DeviceMesh | None) -> bool:
    """Return whether ``shard_layers`` takes a whole model from the host's memory and moves it layer by layer, so that
    no device ever has it whole. One that is split over devices is cut where it lies.
    """
    return mesh is not None and TENSOR not in (mesh.mesh_dim_names or ())


def shard_layers(model: CausalLM, mesh: DeviceMesh, traffic: Traffic = PLAIN) -> None:
    """Split each layer over the ranks that share a model, or rows over those that share rows, if several do. Then shard
    each decoder layer, and the rest (embedding, last norm, head) as one; gradients are summed over ranks.

    The model may lie on the CPU: each layer is whole on the mesh's device only while it is cut. All are given back
    after each forward, the rest too: whoever writes into shards between two forwards, as an optimizer or a weight tag
    does, must find its change in the second.
    """
    names = mesh.mesh_dim_names or ()
    if TENSOR in names:
        split_layers(model, mesh[TENSOR])
        mesh = mesh[DATA]
    elif SEQUENCE in names:
        share_rows(model, mesh[SEQUENCE])
        mesh = flat(mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=traffic.policy(layer=True))
    fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=traffic.policy(layer=False))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the denominator divides, once
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, sharing its memory; an unsharded one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_first_copy(tensor: torch.Tensor) -> bool:
    """Return whether no rank before this one has the same part of a sharded tensor; True of an unsharded one."""
    if not isinstance(tensor, DTensor):
        return True
    place: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    return not any(at for at, kind in zip(place, tensor.placements, strict=True) if kind.is_replicate())


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
