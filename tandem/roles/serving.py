"""Roles of the fully asynchronous mode that serve others: they read columns of a partition and give further ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from tandem.base.errors import ContractError, DeadlineError
from tandem.columns.proto import DataProto
from tandem.models.causal_lm import CausalLM
from tandem.models.weights import copy_weights
from tandem.roles.stages import BatchStage
from tandem.train.protocol import TrainEngine, logprobs_and


def _nothing(partition: int) -> None:
    """A role without weights needs no preparation."""


@dataclass(frozen=True)
class ServingRole:
    """``name`` in plan and messages. ``stages`` run on ``groups`` groups at a time; ``columns`` are what they read.

    ``begin`` is called before the first groups of each partition.
    """

    name: str
    stages: tuple[BatchStage, ...]
    columns: tuple[str, ...]
    groups: int
    begin: Callable[[int], None] = _nothing

    @property
    def gives(self) -> tuple[str, ...]:
        """Columns that the role adds."""
        return tuple(name for stage in self.stages for name in stage.gives)


class ForwardModel:
    """Weights of its own that follow the actor's: the actor_fwd and reference roles.

    ``load`` may come at any time and only keeps the newest weights beside; ``adopt`` puts them in place, so that one
    partition is scored by one version. ``engine`` runs ``model``; ``version`` is the one in place. Only versions that
    ``every`` divides are taken (None: none is).
    """

    def __init__(self, name: str, model: CausalLM, engine: TrainEngine, *, version: int, every: int | None = 1) -> None:
        self.name = name
        self._every = every
        self.version = version
        self._model = model
        self._engine = engine
        self._newest: tuple[int, dict[str, torch.Tensor]] | None = None
        self._arrived = threading.Condition()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Keep a copy of ``weights`` (Hugging Face names) as ``version``, if it is one of those to be taken."""
        if self._every is None or version % self._every:
            return
        copies = {name: tensor.detach().clone() for name, tensor in weights}
        with self._arrived:
            if self._newest is not None and version < self._newest[0]:
                raise ContractError(f"{self.name} was sent version {version} after {self._newest[0]}")
            self._newest = version, copies
            self._arrived.notify_all()

    def adopt(self, oldest: int, newest: int, seconds: float) -> None:
        """Put the newest version held into place; it must lie in ``oldest`` to ``newest``.

        Waits for it. Raises ``DeadlineError`` naming the version that is awaited.
        """
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._held() >= oldest, seconds):
                raise DeadlineError(
                    f"{self.name} waited {seconds:g} s for weights version {oldest} or newer, it has {self._held()}; "
                    "blocked by the actor, which publishes them"
                )
            kept, self._newest = self._newest, None
        if kept is not None:
            version, weights = kept
            copy_weights(self._model, weights.items())
            self.version = version
        if self.version > newest:
            raise ContractError(f"{self.name} holds version {self.version}, the partition admits at most {newest}")

    def logprobs(self, batch: DataProto, column: str, *, squares: bool = False) -> DataProto:
        """The batch with log-probs of its responses as ``column``; with ``squares`` also with ``sum_pi_squared``."""
        found = self._engine.forward(batch, logprobs_and(squares))
        return batch.union(DataProto({column: found.pop("logprobs"), **found}))

    def _held(self) -> int:
        return self.version if self._newest is None else self._newest[0]


def columns_read(stages: Sequence[BatchStage]) -> tuple[str, ...]:
    """What a row of stages must be given: their needs but for what they give each other."""
    given: set[str] = set()
    needed: dict[str, None] = {}
    for stage in stages:
        needed |= dict.fromkeys(name for name in stage.needs if name not in given)
        given |= set(stage.gives)
    return tuple(needed)
