"""The training engine on Megatron-core: what is around a micro-batch is as in every engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tandem.base.errors import ContractError
from tandem.config.model import OptimConfig
from tandem.models.causal_lm import CausalLM
from tandem.models.device import require_on
from tandem.models.fingerprint import fingerprint
from tandem.models.probe import prove
from tandem.train import sharding
from tandem.train.engine import FsdpEngine
from tandem.train.megatron.model import MegatronLM
from tandem.train.packed_engine import PackedEngine
from tandem.train.protocol import Exported, StepResult
from tandem.train.updater import Updater

_MOMENTS = ("exp_avg", "exp_avg_sq")


class MegatronEngine(PackedEngine):
    """Trains a ``CausalLM`` as Megatron-core's model, whose weights it takes; see ``PackedEngine`` for the options.

    ``mesh`` is one of ``rank_mesh``; None: this process alone. Ranks that share a model are its tensor parallelism.
    Others are data-parallel: each has the whole of its part, gradients are summed before the step, and all take the
    same one. ``total_updates`` is where a falling schedule ends.
    """

    model: MegatronLM

    def __init__(
        self,
        model: CausalLM,
        *,
        optim: OptimConfig,
        total_updates: int,
        max_tokens_per_micro_batch: int,
        temperature: float,
        max_samples_per_micro_batch: int | None = None,
        exact: bool = False,
        gradient_checkpointing: bool = False,
        mesh: DeviceMesh | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        prove(model, "training")
        split = mesh is not None and sharding.TENSOR in (mesh.mesh_dim_names or ())
        self._mesh = mesh
        self._tensor = mesh[sharding.TENSOR].get_group() if mesh is not None and split else None
        super().__init__(
            MegatronLM(model, self._tensor, torch.device(device)),
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            temperature=temperature,
            max_samples_per_micro_batch=max_samples_per_micro_batch,
            exact=exact,
            data_group=None if mesh is None else sharding.data_parallel(mesh).get_group(),
            device=device,
        )
        require_on(self.model.core, self.device, "the engine of a train rank")
        if gradient_checkpointing:
            self.model.checkpoint_gradients()
        self._parameters = self.model.parameters_by_name
        cut = {id(self._parameters[p.parameter]) for p in self.model.pieces.values() if p.cut is not None}
        first = self._tensor is None or dist.get_rank(self._tensor) == 0
        self._updater = Updater(
            self._parameters.values(),
            optim,
            total_updates,
            groups=() if self._tensor is None else (self._tensor,),
            counted=lambda parameter: first or id(parameter) in cut,
        )

    def optim_step(self, denominator: float) -> StepResult:
        """Divide the gradient of all ranks once, clip it, update the parameters, and clear it."""
        self.join_gradients()
        return super().optim_step(denominator)

    def join_gradients(self) -> None:
        """Give each rank the gradient of its parameters over all samples and heads; a meeting of all."""
        for name, parameter in self._parameters.items():
            if self._tensor is not None and parameter.grad is not None and name.endswith(_OF_HEADS):
                dist.all_reduce(parameter.grad, group=self._tensor)
            if self._group is not None and dist.get_world_size(self._group) > 1:
                if parameter.grad is None:  # there were no samples here
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self._group)

    # --- weights -----------------------------------------------------------------------------------------------------

    def shards(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of each weight by its Hugging Face name, live; the head is left out where it is the
        embedding.
        """
        return self.seen({name: parameter.detach() for name, parameter in self._parameters.items()})

    def export(self, part: Exported = "merged") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor), one at a time; with several ranks all of them must ask."""
        if part != "merged":
            raise ContractError(f"the engine megatron exports all weights; it has no {part!r} part")
        shards = self.shards()
        for name, piece in self.model.pieces.items():
            shard = shards["model.embed_tokens.weight" if name not in shards else name]
            whole = self._distributed(name, shard.contiguous())
            yield name, (whole.full_tensor() if isinstance(whole, DTensor) else whole).reshape(piece.shape)

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and progress as parts of whole tensors, and numbers; refers to live memory."""
        self.wake()
        moments = {
            moment: self.as_sharded(self.seen({name: self._moments(p)[moment] for name, p in self._parameters.items()}))
            for moment in _MOMENTS
        }
        steps = {name: self._moments(parameter)["step"] for name, parameter in self._parameters.items()}
        return {
            "model": self.as_sharded(self.shards()),
            "optimizer": {**moments, "step": steps},
            "updates": self.updates,
            "skipped": self.skipped,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, whose tensors are cut as those here."""
        own = self.state_dict()
        for kept, given in (
            (own["model"], state["model"]),
            *((own["optimizer"][kind], state["optimizer"][kind]) for kind in (*_MOMENTS, "step")),
        ):
            for name, tensor in kept.items():
                sharding.local_shard(tensor).copy_(sharding.local_shard(given[name]))
        self._updater.as_configured()
        self._updater.updates, self._updater.skipped = state["updates"], state["skipped"]

    def shards_of(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's parts of whole tensors by the names of ``shards()``; others are left aside."""
        return {name: self.model.own_part(name, weights).to(shard) for name, shard in self.shards().items()}

    def as_sharded(self, copies: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the copies of ``shards()`` as parts of whole tensors, which any number of ranks can load; shares their
        memory.
        """
        return {name: self._distributed(name, copy) for name, copy in copies.items()}

    def seen(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights in what is shaped as this rank's parameters; the head only where it has one of its own."""
        return {
            name: piece.of(parameters[piece.parameter])
            for name, piece in self.model.pieces.items()
            if not (self.model.tied and name == "lm_head.weight")
        }

    def _distributed(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        if self._mesh is None:
            return shard
        piece = self.model.pieces[name]
        placements: list[Placement] = [Replicate() for _ in range(self._mesh.ndim)]
        if self._tensor is not None and piece.cut is not None:
            placements[-1] = Shard(piece.cut)
        shape = torch.Size(piece.seen)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(shard, self._mesh, placements, run_check=False, shape=shape, stride=stride)

    def _moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return what the optimizer keeps of a parameter: zeros before its first step."""
        state: dict[str, torch.Tensor] = self._updater.optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {moment: torch.zeros_like(parameter, requires_grad=False) for moment in _MOMENTS}
        return state

    # --- adapters and other models -----------------------------------------------------------------------------------

    @property
    def has_adapters(self) -> bool:
        """False: adapters are not trained here."""
        return False

    def base_fingerprint(self) -> str:
        """Return the fingerprint of nothing: all weights are trained."""
        return fingerprint(())

    def without_adapters(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def beside(self, model: CausalLM) -> PackedEngine:
        """Return an engine of PyTorch's for forwards of another model on the same ranks, sharded over all of them."""
        return FsdpEngine(
            model,
            optim=OptimConfig(),
            total_updates=1,
            max_tokens_per_micro_batch=self._max_tokens,
            max_samples_per_micro_batch=self._max_samples,
            temperature=self._temperature,
            exact=self._exact,
            mesh=None if self._mesh is None else sharding.flat(self._mesh),
            device=self.device,
        )

    # --- ranks -------------------------------------------------------------------------------------------------------

    def _missing(self, count: int) -> int:
        """Return 0: ranks that have other samples meet after the last micro-batch only."""
        return 0

    def _backward(self, loss: torch.Tensor) -> None:
        """Run the backward in the dtype of the forward.

        Megatron-core's products with weights take care of that by themselves on CUDA devices only.
        """
        with self.model.computing():
            loss.backward()


_OF_HEADS = ("q_layernorm.weight", "k_layernorm.weight")
"""Whole on each rank, which has the gradient of its heads alone."""
