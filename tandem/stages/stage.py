"""What a stage is: planned without torch, then bound to live roles and run on batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tandem.base.errors import ContractError
from tandem.config.schema import Config
from tandem.stages.facts import ACTOR, Step

if TYPE_CHECKING:
    from tandem.columns.proto import DataProto

Phase = Literal["group", "sub_batch", "partition"]
PHASES: tuple[Phase, ...] = ("group", "sub_batch", "partition")
"""How much of a partition a stage sees at once, in the order in which that is there."""

Part = Literal["rollout", "forward", "old", "values", "advantages", "train", "push"]
"""Parts of the best possible step (``speed/step_bound``) as which a stage's time is counted."""

Run = Callable[["DataProto"], "DataProto"]
"""Takes a batch, gives it back with further columns."""


@dataclass(frozen=True)
class Roles:
    """The live roles, as far as stages ask them for something; None where this process has no such role.

    ``old_logprobs`` also takes ``squares``: whether sums of squared probabilities are wanted too.
    """

    config: Config
    step: Step
    tokenizer: Any = None
    ref_logprobs: Run | None = None
    old_logprobs: Callable[..., DataProto] | None = None
    teacher: Run | None = None
    values: Run | None = None
    train_critic: Run | None = None
    correction: Run | None = None
    advantages: Run | None = None
    reference_point: Run | None = None


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a plan: done by ``role``, with the weights ``tag`` in place, on a part of the size of ``phase``."""

    name: str
    role: str
    tag: str | None
    phase: Phase
    needs: tuple[str, ...]
    gives: tuple[str, ...]


class Stage(ABC):
    """One thing that is done to a partition, in every mode. The constructor's parameters are its YAML parameters.

    A stage runs where it is ``wanted``, after those that give what it ``needs``. Its time is reported as
    ``time/<name>``.
    """

    name: ClassVar[str]
    phase: ClassVar[Phase] = "sub_batch"
    part: ClassVar[Part] = "forward"
    changes_weights: ClassVar[bool] = False
    """Then the actor's loop does it in every mode, after all that reads the weights before."""

    def wanted(self, step: Step) -> bool:
        """Return whether it is done at all; a stage that the config names always is."""
        del step
        return True

    @abstractmethod
    def needs(self, step: Step) -> tuple[str, ...]:
        """Return the columns that it can't do without."""

    def takes(self, step: Step) -> tuple[str, ...]:
        """Return the columns that it reads where something gives them."""
        del step
        return ()

    @abstractmethod
    def gives(self, step: Step) -> tuple[str, ...]:
        """Return the columns that it adds; a column is given once and never changed."""

    def role(self, step: Step) -> str:
        """Return the role that does it: by default the actor's loop, or in fully_async a loop of its own beside it."""
        return self.name if step.apart else ACTOR

    def tag(self, step: Step) -> str | None:
        """Return the copy of the actor's weights that must be in place."""
        del step
        return None

    def build(self, roles: Roles) -> Run | None:
        """Return what runs it, heavy imports done here; None where a loop does it itself, or the role isn't there."""
        del roles
        return None

    @property
    def time_key(self) -> str:
        """The key in ``metrics.jsonl`` that holds the seconds of this stage."""
        return f"time/{self.name}"

    def planned(self, stages: Iterable[PlannedStage]) -> PlannedStage | None:
        """Return this stage among the planned ones, if it is wanted."""
        return next((planned for planned in stages if planned.name == self.name), None)


@dataclass(frozen=True)
class BatchStage:
    """A planned stage that is ready to run: ``run`` adds the columns ``gives`` to a batch that has those it ``needs``.

    ``phase`` is how much of a partition it must see at once, ``role`` who runs it; who ``changes_weights`` is the
    actor's loop, whatever the role.
    """

    name: str
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    run: Run
    phase: Phase = "partition"
    role: str = ACTOR
    changes_weights: bool = False

    def __call__(self, batch: DataProto) -> DataProto:
        """Run the stage. Raises ``ContractError`` where it got or gave other columns than planned."""
        if missing := [name for name in self.needs if name not in batch.columns]:
            raise ContractError(f"stage {self.name!r} needs column {missing[0]!r}; the batch has {batch.columns}")
        result = self.run(batch)
        added = set(result.columns) - set(batch.columns)
        if added != set(self.gives) - set(batch.columns):
            raise ContractError(f"stage {self.name!r} was planned to give {self.gives}, it gave {sorted(added)}")
        return result
