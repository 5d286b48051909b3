"""Tensor parallelism of training: each layer's heads and MLP columns, and the vocabulary, split over ranks.

The layout is that of Megatron-LM (Shoeybi et al., arXiv 1909.08053): what goes in by columns comes out by rows, so that
a layer has two sums over the ranks in each direction, and what is between its halves is whole on each. Parameters are
torch's distributed tensors, which shards, checkpoints and exports know how to put together. Their local parts are
computed with as plain tensors: distributed ones work out anew how to lay out each number of tokens that comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional

from tandem.base.errors import DataError
from tandem.models.causal_lm import CausalLM
from tandem.models.families import SPLIT
from tandem.models.head.vocabulary import SplitVocabulary
from tandem.models.lora import adapted_layers
from tandem.models.token_ids import TokenIds

Forward = Callable[[torch.Tensor], torch.Tensor]
_WHOLE = Replicate()


def split_layers(model: CausalLM, mesh: DeviceMesh) -> None:
    """Split ``model``, which every rank of the one-dimensional ``mesh`` has whole, in place.

    Its forward then gives each rank the whole hidden states, and a head with a part of the vocabulary. Raises
    ``DataError`` for a model that can't be split so.
    """
    _require_split(model, mesh.size())
    projection, embedding = model.model.get_output_embeddings(), model.model.get_input_embeddings()
    tied = projection.weight is embedding.weight
    rows = len(projection.weight) // mesh.size()
    first = rows * mesh.get_local_rank()
    holes = holes_among(model.tokens, first, rows, model.model.device)
    model.split = SplitVocabulary(mesh.get_group(), first, rows, holes)
    parallelize_module(model.model, mesh, dict(_plan(model, model.split)))
    if tied:
        projection.weight = embedding.weight


def _plan(model: CausalLM, vocabulary: SplitVocabulary) -> Iterator[tuple[str, ParallelStyle]]:
    """Yield how each module with parameters is split, by the last part of its name in the families of ``SPLIT``."""
    group = vocabulary.group
    columns, rows, heads = _Split(Shard(0), _linear), _Split(Shard(1), partial(_rows, group)), _Split(_WHOLE, _of_heads)
    before_columns = _Split(_WHOLE, partial(_before_columns, group))
    styles = {
        "embed_tokens": _Split(Shard(0), partial(_embedding, vocabulary)),
        "lm_head": _Split(Shard(0), _linear),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), columns),
        **dict.fromkeys(("o_proj", "down_proj"), rows),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), before_columns),
        **dict.fromkeys(("q_norm", "k_norm"), heads),
        "norm": _Split(_WHOLE, _whole),
    }
    for name, module in model.model.named_modules():
        if next(module.parameters(recurse=False), None) is None:
            continue
        style = styles.get(name.rpartition(".")[2])
        if style is None:
            raise DataError(
                f"the model family {model.family!r} has weights in {name}, and how they are split over devices is not "
                "known: write tensor_model_parallel_size: 1"
            )
        yield name, style


def _require_split(model: CausalLM, ranks: int) -> None:
    if model.family not in SPLIT or adapted_layers(model):
        what = "a model with adapters" if adapted_layers(model) else f"the model family {model.family!r}"
        raise DataError(f"{what} can't be split over devices: write tensor_model_parallel_size: 1")
    config = model.model.config
    counts = {
        "attention heads": config.num_attention_heads,
        "heads of keys and values": config.num_key_value_heads,
        "columns of the MLP": config.intermediate_size,
        "rows of the embedding": len(model.model.get_input_embeddings().weight),  # type: ignore[arg-type]
    }
    for what, count in counts.items():
        if count % ranks:
            raise DataError(f"{count} {what} can't be split over {ranks} devices: write another number of devices")


def holes_among(tokens: TokenIds | None, first: int, rows: int, device: torch.device) -> torch.Tensor | None:
    """Return those of the rows from ``first`` on that are no tokens, counted from 0; None where all are."""
    if tokens is None:
        return None
    ids = torch.arange(first, first + rows)
    no_tokens = (ids >= tokens.count) | torch.isin(ids, torch.tensor(tokens.holes, dtype=torch.int64))
    found = no_tokens.nonzero()[:, 0]
    return found.to(device) if len(found) else None


# --- modules ---------------------------------------------------------------------------------------------------------


class _Split(ParallelStyle):
    """The parameters of a module lie as ``placement`` says, and its forward becomes what ``make`` makes of it.

    A bias that can't be cut as its matrix is stays whole.
    """

    def __init__(self, placement: Placement, make: Callable[[Any, Forward], Forward]) -> None:
        super().__init__()
        self._placement, self._make = placement, make

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            fits = not isinstance(self._placement, Shard) or self._placement.dim < parameter.dim()
            placement = self._placement if fits else _WHOLE
            # Each rank has the whole tensor already: nothing is sent.
            cut = distribute_tensor(parameter.detach(), device_mesh, (placement,), src_data_rank=None)
            module.register_parameter(name, nn.Parameter(cut, parameter.requires_grad))
        module.forward = self._make(module, module.forward)
        return module


def _local(tensor: torch.Tensor | None, gradient: Placement | None = None) -> Any:
    """Return this rank's part of a parameter, whose own gradient is that of ``gradient``; default: as it lies."""
    if tensor is None:
        return None
    return cast("DTensor", tensor).to_local(grad_placements=None if gradient is None else (gradient,))


def _linear(module: Any, forward: Forward) -> Forward:
    """Multiply with some columns: what comes in is whole, what goes out is this rank's."""
    del forward
    return lambda hidden: functional.linear(hidden, _local(module.weight), _local(module.bias))


def _rows(group: dist.ProcessGroup, module: Any, forward: Forward) -> Forward:
    """Multiply with some rows: what comes in is this rank's, what goes out is the sum over ranks."""
    del forward

    def split(hidden: torch.Tensor) -> torch.Tensor:
        total = _sum_forward(functional.linear(hidden, _local(module.weight)), group)
        return total if module.bias is None else total + _local(module.bias)

    return split


def _embedding(vocabulary: SplitVocabulary, module: Any, forward: Forward) -> Forward:
    """Look tokens up, each on the rank that has it."""
    del forward
    padding = None if module.padding_idx is None else module.padding_idx - vocabulary.first
    if padding is not None and not 0 <= padding < vocabulary.rows:
        padding = None

    def split(ids: torch.Tensor) -> torch.Tensor:
        own, here = vocabulary.own(ids)
        found = functional.embedding(own, _local(module.weight), padding)
        return _sum_forward(found * here[..., None], vocabulary.group)

    return split


def _whole(module: Any, forward: Forward, gradient: Placement | None = None) -> Forward:
    """Run ``forward`` with the whole parameters."""

    def split(hidden: torch.Tensor) -> torch.Tensor:
        distributed = dict(module._parameters)
        module._parameters.update({name: _local(tensor, gradient) for name, tensor in distributed.items()})
        try:
            return forward(hidden)
        finally:
            module._parameters.update(distributed)

    return split


def _of_heads(module: Any, forward: Forward) -> Forward:
    """Run ``forward`` on this rank's heads: each rank has a part of the parameters' gradient."""
    return _whole(module, forward, Partial())


def _before_columns(group: dist.ProcessGroup, module: Any, forward: Forward) -> Forward:
    """Run ``forward``; of what comes after it each rank computes some columns, and gives a part of the gradient."""
    run = _whole(module, forward)
    return lambda hidden: _sum_backward(run(hidden), group)


# --- sums over ranks -------------------------------------------------------------------------------------------------


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _sum_forward(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over ranks; the gradient, which is the same on all, passes as it is."""
    total: torch.Tensor = _SumForward.apply(part, group)  # type: ignore[no-untyped-call]
    return total


def _sum_backward(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return what is the same on all ranks as it is; its gradient is the sum over ranks."""
    same: torch.Tensor = _SumBackward.apply(whole, group)  # type: ignore[no-untyped-call]
    return same
