"""The ``hf`` engine: continuous batching on a transformers model in this process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import torch

from tandem.base.errors import ContractError, TandemError
from tandem.models.causal_lm import CausalLM
from tandem.models.fingerprint import fingerprint, joined
from tandem.models.lora import adapted_layers, base_weights
from tandem.models.probe import prove
from tandem.models.row_cache import RowCache
from tandem.models.weights import copy_weights
from tandem.rollout.decode_lock import DecodeLock
from tandem.rollout.protocol import GroupOutput, GroupRequest, KeepKV, Sampling
from tandem.rollout.scheduler import RunningBatch, Scheduler


class HfEngine:
    """A ``RolloutEngine`` that decodes up to ``max_num_seqs`` samples at once.

    ``shares_weights``: ``model`` is the trainer's own and never written to. ``max_num_batched_tokens`` is the token
    budget of one prefill. ``exact`` decodes each group alone, so that its tokens are bit-equal whatever else is in
    flight, at the cost of the larger batch's speed. ``keep_kv``: samples that go on over a change of the weights keep
    the keys and values that the old ones gave, or have them computed again. ``patience``: seconds that any wait at a
    token boundary may last, such as that for the end of a pause.
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
        patience: float = 600.0,
    ) -> None:
        prove(model, "generation")
        self._model = model
        self._shares_weights = shares_weights
        self._version = version
        self._exact = exact
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._recompute = keep_kv == "recompute"
        self._context = model.context
        self._spare: RowCache | None = None  # of an ended call, for the next one
        self._calls = 0
        self._awake = True
        self._whole = True
        self._base: str | None = None  # fingerprint of what never changes, in a model with adapters
        self._boundary = DecodeLock(patience)
        self._applied_s = 0.0

    @property
    def version(self) -> int:
        return self._version

    @property
    def steps(self) -> int:
        """See ``EngineStats``."""
        return self._boundary.steps

    @property
    def applied_s(self) -> float:
        """See ``EngineStats``."""
        return self._applied_s

    def ping(self, deadline_s: float) -> int:
        """See ``EngineStats``: well is what reaches a token boundary."""
        with self._boundary.change(deadline_s):
            return self._version

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        """See ``RolloutEngine.generate``. Raises ``ContractError`` for a request that can't be answered."""
        if not self._awake:
            raise TandemError("the rollout engine is asleep: call wake() before generate()")
        if sampling.samples > self._max_num_seqs:
            raise ContractError(
                f"max_num_seqs = {self._max_num_seqs} has no room for the {sampling.samples} samples of one prompt: "
                f"write at least {sampling.samples}"
            )
        return self._generate(requests, sampling)

    def _generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        cache = None if self._exact else self._spare or self._model.new_cache()
        self._spare = None
        waiting = Scheduler(requests, sampling, self._max_num_seqs // sampling.samples, self._context)
        running = RunningBatch(self._model, sampling, self._max_num_seqs, cache)
        self._calls += 1
        version, aborts = self._version, self._boundary.aborts
        try:
            while True:
                if self._boundary.aborts != aborts:
                    aborts = self._boundary.aborts
                    yield from running.abort()
                if self._version != version:
                    version = self._version
                    if self._recompute:
                        waiting.give_back(group.resumed() for group in running.abort())
                if running.room and waiting.empty:
                    waiting.pull(idle=running.count == 0)
                if running.count == 0 and waiting.empty:
                    break
                self._advance(waiting, running, version, aborts)
                yield from running.take_finished()
        finally:
            self._calls -= 1
        self._spare = cache

    def _advance(self, waiting: Scheduler, running: RunningBatch, version: int, aborts: int) -> None:
        """Make tokens until a group ends, the source should be asked, the weights change, or all is aborted."""
        with torch.no_grad(), self._model.computing():  # one cast of the weights for all tokens made inside
            while True:
                with self._boundary.token(aborts) as going:
                    if not going or self._version != version:
                        return
                    if not self._whole:
                        raise TandemError("the last load() failed half-way: load a complete set of weights first")
                    while running.room and not waiting.empty:
                        running.admit(waiting.take(running.room, self._max_num_batched_tokens), version)
                    running.step(version)
                if running.ended or (running.room and not waiting.exhausted):
                    return

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> str | None:
        """See ``RolloutEngine.load``. After a load that fails half-way the engine refuses to generate."""
        if self._shares_weights != (weights is None):
            raise ContractError(
                "this engine shares the trainer's parameters: call load(None, version)"
                if self._shares_weights
                else "this engine has parameters of its own: call load(weights, version)"
            )
        names: list[str] = []
        with self._boundary.change():
            started = time.perf_counter()
            if weights is not None:
                self._whole = False
                names = copy_weights(self._model, weights)
                self._whole = True
            self._version = version
            self._applied_s = time.perf_counter() - started
        return None if weights is None else self._fingerprint(names)

    def _fingerprint(self, names: list[str]) -> str:
        """Of what came, and of the base weights where they are adapters."""
        own = self._model.model.state_dict()
        loaded = fingerprint((name, own[name]) for name in names)
        if not adapted_layers(self._model):
            return loaded
        if self._base is None:
            self._base = fingerprint(base_weights(self._model.model))
        return joined(self._base, loaded)

    def pause(self, abort: bool = False) -> None:
        self._boundary.pause(abort)

    def resume(self) -> None:
        self._boundary.resume()

    def sleep(self) -> None:
        if self._calls:
            raise TandemError("sleep() while generate() is at work: exhaust or close its iterator first")
        self._spare = None
        self._awake = False

    def wake(self) -> None:
        self._awake = True
