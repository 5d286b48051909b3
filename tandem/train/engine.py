"""The training engine on PyTorch's ``fully_shard``: one rank is the special case of many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh

from tandem.base.errors import ContractError, DataError
from tandem.config.model import OptimConfig
from tandem.models.causal_lm import CausalLM
from tandem.models.device import require_on
from tandem.models.fingerprint import fingerprint
from tandem.models.lora import adapted_layers, adapter_weights, adapters_off, base_weights, merged_weights
from tandem.models.probe import prove
from tandem.train import sharding
from tandem.train.packed_engine import PackedEngine
from tandem.train.protocol import Exported
from tandem.train.sharding import PLAIN, Traffic
from tandem.train.updater import Updater

_EXPORTS = {"merged": merged_weights, "adapter": adapter_weights, "base": base_weights}


class FsdpEngine(PackedEngine):
    """Trains a ``CausalLM`` with AdamW; see ``TrainEngine`` for what the methods do, ``PackedEngine`` for the options.

    ``mesh`` is one of ``rank_mesh``; None leaves the model unwrapped in this one process. ``traffic``: what its ranks
    hand each other. ``total_updates`` is where a falling schedule ends.
    """

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
        traffic: Traffic = PLAIN,
        device: torch.device | str = "cpu",
    ) -> None:
        group = None if mesh is None else sharding.data_parallel(mesh).get_group()
        super().__init__(
            model if sharding.cuts_layers(mesh) else model.to(device),
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            temperature=temperature,
            max_samples_per_micro_batch=max_samples_per_micro_batch,
            exact=exact,
            data_group=group,
            device=device,
        )
        prove(model, "training")  # while it is whole: where it will run, or where its layers are cut from
        self._mesh, self._traffic = mesh, traffic
        if gradient_checkpointing:
            model.checkpoint_gradients()
        if mesh is not None:
            sharding.shard_layers(model, mesh, traffic)
        require_on(model, self.device, "the engine of a train rank")
        self._trained = {name: p for name, p in model.model.named_parameters() if p.requires_grad}
        self._base: str | None = None
        self._updater = Updater(self._trained.values(), optim, total_updates, groups=sharding.groups_of(mesh))

    def _before_backward(self, left: int) -> None:
        if self._mesh is not None and self._traffic.once:
            root: Any = self.model  # ``fully_shard`` has made it one of its modules
            root.set_requires_gradient_sync(left == 0)

    # --- weights -----------------------------------------------------------------------------------------------------

    def shards(self) -> dict[str, torch.Tensor]:
        """Return the local shards of the trained parameters, live: copy out of and into them in place."""
        return {name: sharding.local_shard(p.detach()) for name, p in self._trained.items()}

    def export(self, part: Exported = "merged") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor) of ``part``, one at a time; with several ranks all of them must ask."""
        return _EXPORTS[part](self.model.model)

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and progress as sharded tensors and numbers; of a model with adapters only those."""
        self.wake()  # a run that is interrupted in the engine's turn is saved, too
        moments = self._updater.optimizer.state
        unused = not moments
        own = self._own_state
        model, optimizer = dcp_state.get_state_dict(self.model, self._updater.optimizer, options=own)
        if unused:  # torch made the moments by a step of its own, without gradient or learning rate, and counted it
            for state in moments.values():
                state["step"].zero_()
        state = {"model": model, "optimizer": optimizer, "updates": self.updates, "skipped": self.skipped}
        return state | {"base": self.base_fingerprint()} if own.ignore_frozen_params else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Raises ``DataError`` if adapters were trained on another base."""
        if self._own_state.ignore_frozen_params and state["base"] != self.base_fingerprint():
            raise DataError(
                "the model is not the one that the saved adapters were trained on: its weights have another "
                "fingerprint. Resume with the model of the saved run, or start a new run from its adapter"
            )
        self.wake()
        dcp_state.set_state_dict(
            self.model,
            self._updater.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self._own_state,
        )
        self._updater.as_configured()
        self._updater.updates, self._updater.skipped = state["updates"], state["skipped"]

    @property
    def _own_state(self) -> StateDictOptions:
        """Frozen weights are read from the model's folder again, so they are not part of the state."""
        frozen = any(not parameter.requires_grad for parameter in self.model.parameters())
        return StateDictOptions(ignore_frozen_params=frozen, strict=not frozen)

    # --- adapters ----------------------------------------------------------------------------------------------------

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are what is trained."""
        return bool(adapted_layers(self.model))

    def base_fingerprint(self) -> str:
        """Return the fingerprint of all weights that are never trained. A meeting of all ranks the first time."""
        if self._base is None:
            exported = base_weights(self.model.model)
            self._base = fingerprint((name, tensor) for name, tensor in exported if name not in self._trained)
        return self._base

    def without_adapters(self) -> AbstractContextManager[None]:
        """Let forwards in this block be the base model's."""
        return adapters_off(self.model)

    # --- shards and the whole ----------------------------------------------------------------------------------------

    def shards_of(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's parts of whole tensors by the names of ``shards()``; others are left aside."""
        found = {}
        for name, parameter in self._trained.items():
            if name not in weights or weights[name].shape != parameter.shape:
                has = f"is {tuple(weights[name].shape)}" if name in weights else "is missing"
                raise ContractError(f"weight {name!r} {has}, the trained one is {tuple(parameter.shape)}")
            found[name] = sharding.part_like(parameter, weights[name].to(parameter.dtype))
        return found

    def as_sharded(self, copies: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the copies of ``shards()`` as parts of whole tensors, which any number of ranks can load; shares their
        memory.
        """
        return {name: sharding.shard_like(self._trained[name], copy) for name, copy in copies.items()}

    def beside(self, model: CausalLM) -> FsdpEngine:
        """Return an engine for forwards of another model on the same ranks, at the same temperature and token
        budget. It is sharded over all of them, never split.
        """
        return FsdpEngine(
            model,
            optim=OptimConfig(),
            total_updates=1,
            max_tokens_per_micro_batch=self._max_tokens,
            max_samples_per_micro_batch=self._max_samples,
            temperature=self._temperature,
            exact=self._exact,
            mesh=None if self._mesh is None else sharding.flat(self._mesh),
            traffic=self._traffic,
            device=self.device,
        )
