"""The ranks of a role as one: rows are dealt, all ranks are called, results come back in the batch's order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from tandem.base.deadline import Deadline
from tandem.base.errors import TandemError, WriteError
from tandem.base.interrupts import held
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.roles.train_rank import RankStatus, TrainRank
from tandem.train.checkpoint import Checkpoint
from tandem.train.engine import FsdpEngine
from tandem.train.objective import LossSum, Objective
from tandem.train.protocol import Exported, StepResult, Wanted
from tandem.train.shard_batch import forward_columns, objective_columns, shard_batch
from tandem.weights.store import ACTOR

logger = logging.getLogger(__name__)

BUCKET_BYTES = 2**26
"""What one bucket of an export holds, unless a single tensor is larger."""

_ANSWER_S = 1.0
"""For a process to give a sign of life."""

_WARNING_S = 60.0
_LOOK_AGAIN_S = 10.0

_LOOK_S = 0.1
"""How long one round of asking the ranks for their replies takes: an error of any of them is seen after that."""

_OTHERS_S = 1.0
"""How long the other ranks have for their own error once one failed: the first is often only the echo of another's."""


class RankError(TandemError):
    """A rank of a role failed or is gone; the message names it and says what it said."""


class Reply(Protocol):
    """The answer to one call."""

    def result(self, timeout: float | None = None) -> Any:
        """The result, or the rank's own error. Raises ``TimeoutError`` where there is neither after ``timeout`` s."""


class RankHandle(Protocol):
    """A ``TrainRank`` somewhere. It works on one call after the other, in the order in which they were submitted."""

    @property
    def name(self) -> str:
        """Which rank, and where, for messages."""

    def submit(self, method: str, *args: Any) -> Reply:
        """Call a method of the ``TrainRank`` by name. Must not wait for the result, unless this is the only rank."""

    def check(self) -> None:
        """Raise ``DiedError`` if the rank is gone; returns at once."""

    def silent_s(self) -> float:
        """Seconds since its process was asked for a sign of life, 0 where it has given it; one at work does too."""


class Done:
    """A result that is there."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self, timeout: float | None = None) -> Any:
        """It."""
        del timeout
        return self._value


class LocalRank:
    """The only rank, in this process: calls are made directly and nothing is copied."""

    def __init__(self, rank: TrainRank, role: str = ACTOR) -> None:
        self.rank = rank
        self.name = f"rank 0 of the {role} in this process"

    def submit(self, method: str, *args: Any) -> Reply:
        """See ``RankHandle.submit``."""
        return Done(getattr(self.rank, method)(*args))

    def check(self) -> None:
        """It is where this is asked."""

    def silent_s(self) -> float:
        """It is where this is asked."""
        return 0.0


class TrainGroup:
    """All ranks of ``role``, as messages call it, as one.

    Every wait ends within ``deadline_s`` and names the ranks that didn't answer; one in which a rank gives no sign of
    life is told every ``warning_s``. After a failure ranks may stand at
    different meetings, so a group of several refuses all later calls. ``balance`` deals rows so that ranks get equally
    many tokens, ``whole_groups`` never cuts a group. Safe for several threads.
    """

    def __init__(
        self,
        ranks: Sequence[RankHandle],
        *,
        deadline_s: float,
        warning_s: float = _WARNING_S,
        role: str = ACTOR,
        balance: bool = False,
        whole_groups: bool = False,
    ) -> None:
        self._ranks, self._role = list(ranks), role
        self._deadline_s, self._balance, self._whole_groups = deadline_s, balance, whole_groups
        self._warning_s = warning_s
        self._turn = threading.Lock()
        self._broken: Exception | None = None
        self._largest = self._mean = 0.0

    @classmethod
    def in_process(cls, engine: FsdpEngine, *, deadline_s: float, role: str = ACTOR) -> TrainGroup:
        """The group of one rank that lives here."""
        return cls([LocalRank(TrainRank(engine), role)], deadline_s=deadline_s, role=role)

    def __len__(self) -> int:
        return len(self._ranks)

    # --- the model ---------------------------------------------------------------------------------------------------

    def forward(self, batch: DataProto, want: Sequence[Wanted], tag: str = ACTOR) -> dict[str, Ragged]:
        """``TrainEngine.forward`` under the weights ``tag``, in the batch's order."""
        lean = _lean(batch, forward_columns(batch))
        if len(self) == 1:
            only: dict[str, Ragged] = self.call("forward", lean, want, tag)
            return only
        parts = self._deal(lean)
        found = self._each("forward", [(lean[rows], want, tag) for rows in parts])
        back = torch.argsort(torch.cat(parts))
        return {name: Ragged.concat([part[name] for part in found]).take(back) for name in found[0]}

    def forward_backward(self, batch: DataProto, objective: Objective) -> LossSum:
        """``TrainEngine.forward_backward`` over the rows of ``batch`` on all ranks."""
        lean = _lean(batch, [*forward_columns(batch), *objective_columns(objective, batch)])
        if len(self) == 1:
            only: LossSum = self.call("forward_backward", lean, objective)
            return only
        parts = self._deal(lean, objective.whole_groups)
        self._weigh(lean, parts)
        total: LossSum = self._each("forward_backward", [(lean[rows], objective) for rows in parts])[0]
        return total

    def optim_step(self, denominator: float) -> StepResult:
        """``TrainEngine.optim_step``; refused unless the actor's own weights are in place."""
        result: StepResult = self.call("optim_step", denominator)
        return result

    def take_imbalance(self) -> float | None:
        """Tokens of the fullest rank / mean over ranks, in all train calls since the last question; None for one rank.

        All ranks wait for the fullest in every mini-batch, so it is the sum of these maxima that counts.
        """
        ratio = self._largest / self._mean if self._mean else None
        self._largest = self._mean = 0.0
        return ratio

    # --- weights -----------------------------------------------------------------------------------------------------

    def save_tag(self, tag: str) -> None:
        """Copy the weights in place into ``tag``."""
        self.call("save_tag", tag)

    def tag_base(self, tag: str) -> None:
        """Let ``tag`` be the base model, the adapters switched off: no copy is made."""
        self.call("tag_base", tag)

    def load_tag(self, tag: str, path: str, trust_remote_code: bool = False) -> None:
        """Fill ``tag`` from a model of the actor's architecture: a folder that every rank sees, or a hub id."""
        self.call("load_tag", tag, path, trust_remote_code)

    def load_beside(self, name: str, path: str, dtype: str = "float32", trust_remote_code: bool = False) -> None:
        """Bring another model onto the ranks, of any architecture; ``forward`` finds it as the tag ``name``."""
        self.call("load_beside", name, path, dtype, trust_remote_code)

    def copy_tag(self, source: str, target: str) -> None:
        """Make ``target`` equal to the saved tag ``source``."""
        self.call("copy_tag", source, target)

    def require_actor(self, purpose: str) -> None:
        """Refuse ``purpose`` unless the actor's own weights are in place."""
        self.call("require_actor", purpose)

    def export(self, part: Exported = "merged", bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full tensor) of ``part``; see ``TrainEngine.export``.

        Sharded ones are gathered bucket by bucket, no more than one at a time. Other calls may come between buckets;
        an optimizer step among them would mix two versions.
        """
        self.call("open_export", part)
        while bucket := self.call("next_bucket", bucket_bytes):
            yield from bucket

    def fingerprint(self, part: Exported = "merged") -> str:
        """What an engine that took an export of ``part`` over answers."""
        found: str = self.call("fingerprint", part)
        return found

    def base_fingerprint(self) -> str:
        """Of the weights beside the adapters, which never change."""
        found: str = self.call("base_fingerprint")
        return found

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, root: Path, step: int, facts: Mapping[str, Any], keep: int, parts: Mapping[str, Path] | None = None
    ) -> Checkpoint:
        """``checkpoint.save`` of model, optimizer and tags; ``root`` is a folder that every rank sees."""
        saved: Checkpoint = self.call("save_checkpoint", root, step, facts, keep, parts)
        return saved

    def load_checkpoint(self, path: Path) -> None:
        """Continue from the checkpoint in the folder ``path``, written by any number of ranks."""
        self.call("load_checkpoint", path)

    # --- turns and health --------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Give up the memory that only training needs."""
        self.call("sleep")

    def wake(self) -> None:
        """Undo ``sleep``."""
        self.call("wake")

    def status(self) -> list[RankStatus]:
        """Where each rank is. Raises ``RankError`` for one that is gone."""
        return self._all("status")

    def check(self) -> None:
        """Raise what ended a rank, if anything did; returns at once, whatever the ranks are doing."""
        for rank in self._ranks:
            rank.check()

    # --- calls -------------------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of every rank, all with the same arguments; the answer of the first, which speaks for all."""
        return self._all(method, *args)[0]

    def _all(self, method: str, *args: Any) -> list[Any]:
        return self._each(method, [args] * len(self._ranks))

    def _each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call each rank with its own arguments; results by rank."""
        # Submissions of two threads must reach all ranks in one order, or meetings would cross.
        with self._turn:
            if self._broken is not None:
                raise RankError(f"{method}: the ranks of the {self._role} can't go on after an error") from self._broken
            try:
                with held():  # all ranks are called, or none: else they would stand at different meetings
                    replies = [r.submit(method, *args) for r, args in zip(self._ranks, arguments, strict=True)]
            except Exception as error:
                self._give_up(error)
                raise
        try:
            return self._gather(method, replies)
        except Exception as error:
            self._give_up(error)
            raise

    def _give_up(self, error: Exception) -> None:
        if len(self) > 1 and not isinstance(error, WriteError):  # that one all ranks agree on, at the same meeting
            self._broken = error

    def silent(self) -> list[str]:
        """The ranks whose processes don't answer within a second, in words."""
        deadline = Deadline(_ANSWER_S)
        while quiet := [rank.name for rank in self._ranks if rank.silent_s() > 0]:
            if deadline.left == 0.0:
                return [f"{name} gives no sign of life" for name in quiet]
            time.sleep(_LOOK_S)
        return []

    def _tell(self, method: str, seconds: float) -> None:
        """Warn of ranks that are no longer there to finish ``method``; one that is at work is no reason to."""
        if silent := self.silent():
            logger.warning("%s stalled for %.0f seconds: %s", method, seconds, "; ".join(silent))

    def _gather(self, method: str, replies: Sequence[Reply]) -> list[Any]:
        deadline, told = Deadline(self._deadline_s), Deadline(max(0.0, self._warning_s - _ANSWER_S))
        results: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        waiting = dict(enumerate(replies))
        while waiting:
            for rank, reply in list(waiting.items()):
                try:
                    results[rank] = reply.result(min(deadline.left, _LOOK_S / len(waiting)))
                except TimeoutError:
                    continue
                except Exception as error:
                    deadline = deadline if failed else Deadline(min(deadline.left, _OTHERS_S))
                    failed[rank] = error
                del waiting[rank]
            if failed and (not waiting or deadline.left == 0.0):
                raise self._error(method, failed)
            if waiting and told.left == 0.0:
                told = Deadline(min(self._warning_s, _LOOK_AGAIN_S))
                self._tell(method, time.monotonic() - deadline.started)
            if waiting:
                awaited = f"{method} on {len(self)} ranks of the {self._role}"
                deadline.check(awaited, ", ".join(self._ranks[rank].name for rank in waiting))
        return [results[rank] for rank in range(len(replies))]

    def _error(self, method: str, failed: Mapping[int, Exception]) -> Exception:
        """The reason why a rank refused, if one did; else what all that failed said."""
        for error in failed.values():
            if isinstance(error, TandemError):
                return error
        said = "; ".join(f"{self._ranks[rank].name}: {type(e).__name__}: {e}" for rank, e in sorted(failed.items()))
        error = RankError(f"{method} failed on {said}")
        error.__cause__ = next(iter(failed.values()))
        return error

    # --- dealing -----------------------------------------------------------------------------------------------------

    def _deal(self, batch: DataProto, whole_groups: bool = False) -> list[torch.Tensor]:
        whole = whole_groups or self._whole_groups
        return shard_batch(batch, len(self), balance=self._balance, whole_groups=whole)

    def _weigh(self, batch: DataProto, parts: Sequence[torch.Tensor]) -> None:
        lengths = batch.ragged("prompts").lengths + batch.ragged("responses").lengths
        sums = [int(lengths[rows].sum()) for rows in parts]
        self._largest += max(sums)
        self._mean += sum(sums) / len(sums)


def _lean(batch: DataProto, names: Sequence[str]) -> DataProto:
    """Only what a rank reads, without what can't or needn't travel."""
    lean = batch.select(*dict.fromkeys(names))
    lean.meta_info, lean.tokenizer = {}, None
    return lean
