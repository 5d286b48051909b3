"""The ranks of a role as one: rows are sharded, all ranks are called, results come back in the batch's order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Concatenate, Generic

import torch

from tandem.base.deadline import Deadline
from tandem.base.errors import TandemError, WriteError
from tandem.base.interrupts import held
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.roles.rank_calls import Call, LocalRank, P, RankHandle, RankT_co, Reply, T, call
from tandem.roles.train_rank import TagDevice, TrainRank
from tandem.stages.facts import OLD_ACTOR, PROMPT_ROUTES, ROUTES
from tandem.train.objective import LossSum, Objective
from tandem.train.packed_engine import PackedEngine
from tandem.train.protocol import Exported, Wanted
from tandem.train.shard_batch import forward_columns, objective_columns, shard_batch
from tandem.weights.store import ACTOR

logger = logging.getLogger(__name__)

BUCKET_BYTES = 2**26
"""What one bucket of an export holds, unless a single tensor is larger."""

_ANSWER_S = 3.0
"""For a process to give a sign of life, on a machine that is busy."""

_WARNING_S = 60.0
_LOOK_AGAIN_S = 10.0

_LOOK_S = 0.1
"""How long one round of asking the ranks for their replies takes: an error of any of them is seen after that."""

_OTHERS_S = 1.0
"""How long the other ranks have for their own error once one failed: the first is often only the echo of another's."""


class RankError(TandemError):
    """A rank of a role failed or is gone; the message names it and says what it said."""


class TrainGroup(Generic[RankT_co]):
    """All ranks of ``role``, as messages call it, as one: ``call`` has every rank do the same, and what follows shards
    rows or gathers weights.

    Every wait ends within ``deadline_s`` and names the ranks that didn't answer; one in which a rank gives no sign of
    life is warned of every ``warning_s``. After a failure ranks may stand at different meetings, so a group of several
    refuses all later calls. ``balance`` shards rows so that ranks get equally many tokens (a patch of an image
    counts as ``patch_tokens``), ``whole_groups`` never cuts
    a group. ``same_rows`` neighbours share a model, or each row, and get the same. Safe for several threads.
    """

    def __init__(
        self,
        ranks: Sequence[RankHandle[RankT_co]],
        *,
        deadline_s: float,
        warning_s: float = _WARNING_S,
        role: str = ACTOR,
        balance: bool = False,
        whole_groups: bool = False,
        same_rows: int = 1,
        patch_tokens: float = 0.0,
    ) -> None:
        self._same_rows, self._patch_tokens = same_rows, patch_tokens
        self._ranks, self._role = list(ranks), role
        self._deadline_s, self._balance, self._whole_groups = deadline_s, balance, whole_groups
        self._warning_s = warning_s
        self._turn = threading.Lock()
        self._broken: Exception | None = None
        self._largest = self._mean = 0.0

    @staticmethod
    def in_process(
        engine: PackedEngine, *, deadline_s: float, role: str = ACTOR, tag_device: TagDevice = "device"
    ) -> TrainGroup[TrainRank]:
        """Return the group of one rank that lives here."""
        rank = TrainRank(engine, tag_device=tag_device)
        return TrainGroup([LocalRank(rank, role)], deadline_s=deadline_s, role=role)

    def __len__(self) -> int:
        return len(self._ranks)

    def name_of(self, rank: int) -> str:
        """Return what messages call a rank."""
        return self._ranks[rank].name

    # --- the same for every rank -------------------------------------------------------------------------------------

    def call(self, method: Callable[Concatenate[RankT_co, P], T], /, *args: P.args, **options: P.kwargs) -> T:
        """Have every rank do ``method`` with the same arguments, as in ``ranks.call(TrainRank.save_tag, REF)``.

        Answers what the first rank does. Raises the reason of a rank that refuses, ``RankError`` for one that fails or
        is gone, ``DeadlineError`` naming those that don't answer.
        """
        return self.every(method, *args, **options)[0]

    def every(self, method: Callable[Concatenate[RankT_co, P], T], /, *args: P.args, **options: P.kwargs) -> list[T]:
        """Do as ``call``, with what every rank answers, by rank."""
        return self._each([call(method, *args, **options)] * len(self))

    def aside(
        self, rank: int, method: Callable[Concatenate[RankT_co, P], T], /, *args: P.args, **options: P.kwargs
    ) -> T:
        """Have one rank do ``method`` beside whatever it is doing, also after an error of another. No meeting.

        Raises ``DeadlineError`` naming the rank where it doesn't answer.
        """
        handle, deadline = self._ranks[rank], Deadline(self._deadline_s)
        reply = handle.aside(call(method, *args, **options))
        while True:
            try:
                return reply.result(min(deadline.left, _LOOK_AGAIN_S))
            except TimeoutError:
                deadline.check(f"{method.__name__} on a rank of the {self._role}", handle.name)

    # --- rows over ranks ---------------------------------------------------------------------------------------------

    def forward(self, batch: DataProto, want: Sequence[Wanted], tag: str = ACTOR) -> dict[str, Ragged]:
        """Run ``TrainEngine.forward`` under the weights ``tag``, in the batch's order.

        Recorded routes are those of the policy: other weights choose experts of their own.
        """
        kept = forward_columns(batch)
        if tag not in (ACTOR, OLD_ACTOR):
            kept = [name for name in kept if name not in (PROMPT_ROUTES, ROUTES)]
        lean = _lean(batch, kept)
        if len(self) == 1:
            return self.call(TrainRank.forward, lean, want, tag)
        parts = self._shard(lean)
        calls = [call(TrainRank.forward, part, want, tag) for part in self._each_gets(lean, parts)]
        found = self._each(calls)[:: self._same_rows]
        back = torch.argsort(torch.cat(parts))
        return {name: Ragged.concat([part[name] for part in found]).take(back) for name in found[0]}

    def forward_backward(self, batch: DataProto, objective: Objective) -> LossSum:
        """Run ``TrainEngine.forward_backward`` over the rows of ``batch`` on all ranks."""
        lean = _lean(batch, [*forward_columns(batch), *objective_columns(objective, batch)])
        if len(self) == 1:
            return self.call(TrainRank.forward_backward, lean, objective)
        parts = self._shard(lean, objective.whole_groups)
        self._weigh(lean, parts)
        calls = [call(TrainRank.forward_backward, part, objective) for part in self._each_gets(lean, parts)]
        return self._each(calls)[0]

    def take_imbalance(self) -> float | None:
        """Return the tokens of the fullest rank / mean over ranks, in all train calls since the last question; None if
        all have the same.

        All ranks wait for the fullest in every mini-batch, so it is the sum of these maxima that counts.
        """
        ratio = self._largest / self._mean if self._mean and len(self) > self._same_rows else None
        self._largest = self._mean = 0.0
        return ratio

    # --- weights gathered from ranks ---------------------------------------------------------------------------------

    def export(self, part: Exported = "merged", bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor) of ``part``; see ``TrainEngine.export``.

        Sharded ones are gathered bucket by bucket, no more than one at a time. Other calls may come between buckets;
        an optimizer step among them would mix two versions.
        """
        self.call(TrainRank.open_export, part)
        while bucket := self.call(TrainRank.next_bucket, bucket_bytes):
            yield from bucket

    # --- health ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what ended a rank, if anything did; returns at once, whatever the ranks are doing."""
        for rank in self._ranks:
            rank.check()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _each(self, calls: Sequence[Call[RankT_co, T]]) -> list[T]:
        """Make a call of one method for each rank; results by rank."""
        method = calls[0].name
        # Submissions of two threads must reach all ranks in one order, or meetings would cross.
        with self._turn:
            if self._broken is not None:
                raise RankError(f"{method}: the ranks of the {self._role} can't go on after an error") from self._broken
            try:
                with held():  # all ranks are called, or none: else they would stand at different meetings
                    replies = [rank.submit(one) for rank, one in zip(self._ranks, calls, strict=True)]
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
        """Return the ranks whose processes don't answer within seconds, in words."""
        return [f"{name} gives no sign of life" for name in self._quiet()]

    def _quiet(self) -> list[str]:
        deadline, quiet = Deadline(_ANSWER_S), [rank for rank in self._ranks if rank.silent_s() > 0]
        while quiet and deadline.left > 0.0:
            time.sleep(_LOOK_S)
            quiet = [rank for rank in quiet if rank.silent_s() > 0]  # who has answered is asked no more
        return [rank.name for rank in quiet]

    def _warn_of_silent(self, method: str, since: float) -> None:
        """Warn of ranks that are no longer there to finish ``method``; one that is at work is no reason to."""
        if silent := self.silent():
            logger.warning("%s stalled for %.0f seconds: %s", method, time.monotonic() - since, "; ".join(silent))

    def _gather(self, method: str, replies: Sequence[Reply[T]]) -> list[T]:
        deadline, warning = Deadline(self._deadline_s), Deadline(max(0.0, self._warning_s - _ANSWER_S))
        results: dict[int, T] = {}
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
            if waiting and warning.left == 0.0:
                warning = Deadline(min(self._warning_s, _LOOK_AGAIN_S))
                self._warn_of_silent(method, deadline.started)
            if waiting:
                awaited = f"{method} on {len(self)} ranks of the {self._role}"
                quiet = self._quiet() if deadline.left == 0.0 else []  # the others only wait for them
                late = [f"{name}, which gives no sign of life" for name in quiet]
                deadline.check(awaited, ", ".join(late or [self._ranks[rank].name for rank in waiting]))
        return [results[rank] for rank in range(len(replies))]

    def _error(self, method: str, failed: Mapping[int, Exception]) -> Exception:
        """Return the reason why a rank refused, if one did; else what all that failed said."""
        for error in failed.values():
            if isinstance(error, TandemError):
                return error
        said = "; ".join(f"{self._ranks[rank].name}: {type(e).__name__}: {e}" for rank, e in sorted(failed.items()))
        error = RankError(f"{method} failed on {said}")
        error.__cause__ = next(iter(failed.values()))
        return error

    # --- sharding ----------------------------------------------------------------------------------------------------

    def _shard(self, batch: DataProto, whole_groups: bool = False) -> list[torch.Tensor]:
        whole = whole_groups or self._whole_groups
        parts = len(self) // self._same_rows
        cost = self._patch_tokens
        return shard_batch(batch, parts, balance=self._balance, whole_groups=whole, patch_tokens=cost)

    def _each_gets(self, batch: DataProto, parts: Sequence[torch.Tensor]) -> list[DataProto]:
        """Return what each rank gets of ``batch``, which is cut into ``parts``."""
        return [part for rows in parts for part in [batch[rows]] * self._same_rows]

    def _weigh(self, batch: DataProto, parts: Sequence[torch.Tensor]) -> None:
        lengths = batch.ragged("prompts").lengths + batch.ragged("responses").lengths
        sums = [int(lengths[rows].sum()) for rows in parts]
        self._largest += max(sums)
        self._mean += sum(sums) / len(sums)


def _lean(batch: DataProto, names: Sequence[str]) -> DataProto:
    """Keep only what a rank reads, without what can't or needn't travel."""
    lean = batch.select(*dict.fromkeys(names))
    lean.meta_info, lean.tokenizer = {}, None
    return lean
