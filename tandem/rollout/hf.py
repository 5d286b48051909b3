"""The ``hf`` engine: continuous batching on a transformers model in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from tandem.base.device_kinds import CPU
from tandem.base.errors import ContractError
from tandem.models.cast_weights import CastWeights
from tandem.models.causal_lm import CausalLM
from tandem.models.device import free_memory, give_back
from tandem.models.fingerprint import fingerprint, joined
from tandem.models.kv_cost import KVCost
from tandem.models.kv_measure import measured_cost
from tandem.models.layouts.kv_store import KVPool
from tandem.models.layouts.row_cache import RowCache
from tandem.models.lora import adapted_layers, base_weights
from tandem.models.probe import prove
from tandem.models.weights import copy_weights
from tandem.rollout.kv_room import KVRoom
from tandem.rollout.protocol import KeepKV, Sampling
from tandem.rollout.running_batch import RunningBatch
from tandem.rollout.stepping import RunningGroups, SteppedEngine

_PART_OF_DEVICE, _PART_OF_HOST = 0.8, 0.5
"""Of the memory that is free, for keys and values: the rest is for what a forward holds, and on a host for others."""


class HfEngine(SteppedEngine):
    """A ``RolloutEngine`` that decodes up to ``max_num_seqs`` samples at once.

    ``shares_weights``: ``model`` is the trainer's own and never written to. ``exact`` decodes each group alone, so that
    its tokens are bit-equal whatever else is in flight, at the cost of the larger batch's speed. ``kv_cache_gib``: GiB
    of memory that keys and values may take; None: a part of what the device has free when a generation begins. Prompts
    wait until they fit. The others: see ``SteppedEngine``.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        shares_weights: bool = False,
        version: int = 0,
        exact: bool = False,
        max_num_seqs: int = 512,
        max_num_batched_tokens: int = 16384,
        keep_kv: KeepKV = "old",
        kv_cache_gib: float | None = None,
        patience: float = 600.0,
    ) -> None:
        prove(model, "generation")
        super().__init__(
            version=version,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            keep_kv=keep_kv,
            context=model.context,
            patience=patience,
        )
        self._model, self._device = model, model.model.device
        self._shares_weights = shares_weights
        compute = model.compute_dtype
        casts = compute != torch.float32
        self._casts = CastWeights(model.model, compute, frozen_only=shares_weights) if casts else None
        self._exact = exact
        self._kv_cache_gib = kv_cache_gib
        self._cost: tuple[str, KVCost] | None = None  # of keys and values, as the model ran when it was measured
        self._memory: KVRoom | None = None
        self._pool = KVPool()  # of all generations
        self._spare: RowCache | None = None  # of an ended call, for the next one
        self._base: str | None = None  # fingerprint of what never changes, in a model with adapters

    def _open(self, sampling: Sampling) -> RunningBatch:
        with self._boundary.change():
            memory = self._room()
            cache = None if self._exact else self._spare or self._model.new_cache(pool=self._pool)
            self._spare = None
            return RunningBatch(self._model, sampling, self._max_num_seqs, cache, memory, self._pool)

    def _room(self) -> KVRoom:
        """Return the memory of keys and values, measured anew where nobody generates."""
        if self._memory is not None and self._memory.used:
            return self._memory
        if self._cost is None or self._cost[0] != self._model.route:
            with self._computing():  # with the casts that the answers need, too
                self._cost = self._model.route, measured_cost(self._model)
        cost = self._cost[1]
        memory = KVRoom(cost, *self._bound(cost), apart=self._exact)
        if memory.slots is not None and self._pool.allocated > memory.slots:
            self._spare = None
        self._pool.slots, self._memory = memory.slots, memory
        return memory

    def _bound(self, cost: KVCost) -> tuple[int | None, str]:
        """Return the bytes that keys and values may take, and in words why no more."""
        if self._kv_cache_gib is not None:
            return int(self._kv_cache_gib * 2**30), "as kv_cache_gib says"
        free, part = free_memory(self._device), _PART_OF_HOST if self._device.type == CPU else _PART_OF_DEVICE
        if free is None:
            return None, ""
        return int(part * (free + self._pool.allocated * cost.token)), f"{part:.0%} of what {self._device} has free"

    def _ended(self, running: RunningGroups) -> None:
        assert isinstance(running, RunningBatch)
        used = self._memory is not None and self._memory.used
        self._spare = None if used else running.cache  # while others generate, memory is theirs

    @contextmanager
    def _computing(self) -> Iterator[None]:
        casts = nullcontext() if self._casts is None else self._casts.used()
        with torch.no_grad(), self._model.computing(), casts:
            yield

    def _forget_casts(self) -> None:
        if self._casts is not None:
            self._casts.forget()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> str | None:
        """Copy the weights in at the next token boundary. After a load that fails half-way nothing is generated.

        After a load that fails half-way the engine refuses to generate.
        """
        if self._shares_weights != (weights is None):
            raise ContractError(
                "this engine shares the trainer's parameters: call load(None, version)"
                if self._shares_weights
                else "this engine has parameters of its own: call load(weights, version)"
            )
        names: list[str] = []
        with self._loading(version):
            self._forget_casts()
            if weights is not None:
                names = copy_weights(self._model, weights)
        return None if weights is None else self._fingerprint(names)

    def _fingerprint(self, names: list[str]) -> str:
        """Return the fingerprint of what came, joined with that of the base weights where they are adapters."""
        own = self._model.model.state_dict()
        loaded = fingerprint((name, own[name]) for name in names)
        if not adapted_layers(self._model):
            return loaded
        if self._base is None:
            self._base = fingerprint(base_weights(self._model.model))
        return joined(self._base, loaded)

    def sleep(self) -> None:
        """Free keys and values; weights of its own go to the host, where ``load`` finds them."""
        super().sleep()
        self._spare = None
        self._forget_casts()
        if not self._shares_weights:
            self._model.to("cpu")
        give_back(self._device)

    def wake(self) -> None:
        """Have the weights on the device again."""
        if not self._shares_weights:
            self._model.to(self._device)
        super().wake()
