"""Roles of the fully asynchronous mode that serve others: they read columns of a partition and give further ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tandem.base.errors import ContractError, DeadlineError
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.dataflow.partition import Order
from tandem.models.causal_lm import CausalLM
from tandem.models.fingerprint import fingerprint, joined
from tandem.models.lora import adapted_layers, base_weights
from tandem.models.weights import copy_weights, own_weights
from tandem.stages.stage import BatchStage
from tandem.train.protocol import TrainEngine, Wanted, logprobs_and
from tandem.weights.broadcast import Member
from tandem.weights.sync import LEFT_OUT, Weights


@dataclass(frozen=True)
class ServingRole:
    """``name`` in plan and messages. ``stages`` run on ``groups`` groups at a time; ``columns`` are what they read.

    ``order`` is that in which groups are taken: what is computed over a whole partition is summed in canonical order,
    so that it is the same in every mode.

    ``begin`` is called before the first groups of each partition.
    """

    name: str
    stages: tuple[BatchStage, ...]
    columns: tuple[str, ...]
    groups: int
    order: Order
    begin: Callable[[int], None]

    @property
    def gives(self) -> tuple[str, ...]:
        """Columns that the role adds."""
        return tuple(name for stage in self.stages for name in stage.gives)


class Scorer(Protocol):
    """A model that only scores, wherever it is. ``LocalScorer`` is in this process, ``GroupScorer`` on ranks of Ray."""

    def keep(self, weights: Weights) -> Weights:
        """Keep ``weights`` (Hugging Face names) as they are now, to be put in place later."""

    def fingerprint(self, weights: Weights) -> str:
        """Return the fingerprint of ``weights``, joined with that of the base weights where they are adapters."""

    def place(self, weights: Weights) -> None:
        """Score with these weights from now on."""

    def held(self) -> Weights:
        """Return the weights in place, once others than those at the start were placed; for ``place``."""

    def forward(self, batch: DataProto, want: Sequence[Wanted]) -> dict[str, Ragged]:
        """Return per-token results by name, aligned with ``responses``, with the weights that were placed last."""


class LocalScorer:
    """A ``Scorer`` in this process: ``engine`` runs ``model``."""

    def __init__(self, model: CausalLM, engine: TrainEngine) -> None:
        self._model, self._engine = model, engine
        self._base: str | None = None

    def keep(self, weights: Weights) -> Weights:
        """Return a copy, which later training steps leave as it is."""
        return [(name, tensor.detach().clone()) for name, tensor in weights]

    def fingerprint(self, weights: Weights) -> str:
        """Return the fingerprint of ``weights``; of adapters joined with that of their base."""
        if not adapted_layers(self._model):
            return fingerprint(weights)
        if self._base is None:
            self._base = fingerprint(base_weights(self._model.model))
        return joined(self._base, fingerprint(weights))

    def place(self, weights: Weights) -> None:
        """Copy ``weights`` into the model's parameters."""
        copy_weights(self._model, weights)

    def held(self) -> Weights:
        """Return the parameters of the model as they are now."""
        return own_weights(self._model).items()

    def forward(self, batch: DataProto, want: Sequence[Wanted]) -> dict[str, Ragged]:
        """Return per-token results by name, computed in this process."""
        return self._engine.forward(batch, want)


@runtime_checkable
class Watchable(Protocol):
    """A scorer whose work is done in other processes. ``GroupScorer`` is one."""

    def silent(self) -> list[str]:
        """Return the processes that give no sign of life, in words."""


@runtime_checkable
class Distributed(Protocol):
    """A scorer whose processes a broadcast reaches. ``GroupScorer`` is one."""

    def members(self) -> Sequence[Member]:
        """Return them, the same objects each time."""


class ForwardModel:
    """Weights of its own that follow the actor's: the actor_fwd and reference roles.

    ``load`` may come at any time and only keeps the newest weights beside; ``adopt`` puts them in place, so that one
    partition is scored by one version. ``version`` is the one in place, ``awaited`` the oldest of those that ``adopt``
    waits for, if it does. Only versions that ``every`` divides are taken (None: none is).
    """

    def __init__(self, name: str, scorer: Scorer, *, version: int, every: int | None = 1) -> None:
        self.name = name
        self._every = every
        self.version = version
        self._scorer = scorer
        self.awaited: int | None = None
        self._newest: tuple[int, Weights] | None = None
        self._arrived = threading.Condition()

    def members(self, version: int) -> Sequence[Member]:
        """Return the processes that a broadcast of ``version`` must reach; none where it is left out."""
        if self._leaves_out(version) or not isinstance(self._scorer, Distributed):
            return ()
        return self._scorer.members()

    def load(self, weights: Weights, version: int) -> str:
        """Keep ``weights`` (Hugging Face names) as ``version``, if it is one of those to be taken.

        Answers the fingerprint of what is kept, or ``LEFT_OUT``.
        """
        if self._leaves_out(version):
            return LEFT_OUT
        kept = self._scorer.keep(weights)
        with self._arrived:
            if self._newest is not None and version < self._newest[0]:
                raise ContractError(f"{self.name} was sent version {version} after {self._newest[0]}")
            self._newest = version, kept
            self._arrived.notify_all()
        return self._scorer.fingerprint(kept)

    def adopt(self, oldest: int, newest: int, seconds: float) -> None:
        """Put the newest version held into place; it must lie in ``oldest`` to ``newest``.

        Waits for it. Raises ``DeadlineError`` naming the version that is awaited.
        """
        with self._arrived:
            self.awaited = oldest if self._held() < oldest else None
            if not self._arrived.wait_for(lambda: self._held() >= oldest, seconds):
                raise DeadlineError(
                    f"{self.name} waited {seconds:g} s for weights version {oldest} or newer, it has {self._held()}; "
                    "blocked by the actor, which publishes them"
                )
            kept, self._newest, self.awaited = self._newest, None, None
        if kept is not None:
            version, weights = kept
            self._scorer.place(weights)
            self.version = version
        if self.version > newest:
            raise ContractError(f"{self.name} holds version {self.version}, the partition admits at most {newest}")

    def held(self) -> Weights:
        """Return the weights in place, where they are not those of the start."""
        return self._scorer.held()

    def silent(self) -> list[str]:
        """Return the processes of it that give no sign of life, in words."""
        return self._scorer.silent() if isinstance(self._scorer, Watchable) else []

    def restore(self, weights: Weights, version: int) -> None:
        """Begin with ``weights``, which were ``held`` as ``version`` in an earlier run."""
        self._scorer.place(weights)
        self.version = version

    def logprobs(self, batch: DataProto, column: str, *, squares: bool = False) -> DataProto:
        """Return the batch with log-probs of its responses as ``column``; with ``squares`` also with
        ``sum_pi_squared``.
        """
        found = self._scorer.forward(batch, logprobs_and(squares))
        return batch.union(DataProto({column: found.pop("logprobs"), **found}))

    def _leaves_out(self, version: int) -> bool:
        return self._every is None or version % self._every != 0

    def _held(self) -> int:
        return self.version if self._newest is None else self._newest[0]


def columns_read(stages: Sequence[BatchStage]) -> tuple[str, ...]:
    """Return what a row of stages must be given: their needs but for what they give each other."""
    given: set[str] = set()
    needed: dict[str, None] = {}
    for stage in stages:
        needed |= dict.fromkeys(name for name in stage.needs if name not in given)
        given |= set(stage.gives)
    return tuple(needed)
