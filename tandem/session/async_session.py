"""The live handles of the fully asynchronous mode."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tandem.base.errors import DeadlineError
from tandem.columns.proto import DataProto
from tandem.dataflow.tickets import Lease
from tandem.roles.advantages import AdvantageReport
from tandem.roles.batch_metrics import check_lag
from tandem.roles.loss import without_samples
from tandem.roles.serving import ForwardModel, ServingRole
from tandem.session.moved_reference import is_part, write_reference
from tandem.session.streaming import StreamingSession
from tandem.stages.facts import REFERENCE
from tandem.stages.stage import BatchStage

_TICK_S = 0.25
_JOIN_S = 2.0  # for a loop that is told to end; it is a daemon, and may wait for weights that never come


@dataclass
class Loops:
    """The threads of the serving roles; ``error`` is what ended one of them, ``stopping`` ends all.

    ``told`` is of the partitions whose advantages are there, which may be ahead of the one that is trained.
    ``seconds`` are those of their stages, by partition and name: a stage is one role's, hence one thread's.
    """

    stopping: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    threads: list[threading.Thread] = field(default_factory=list)
    told: dict[int, AdvantageReport] = field(default_factory=dict)
    seconds: defaultdict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class AsyncSession(StreamingSession):
    """A streaming session in which ``roles`` serve the actor with columns; ``models`` are those with own weights."""

    roles: tuple[ServingRole, ...]
    loops: Loops
    models: tuple[ForwardModel, ...]

    @contextmanager
    def serving(self, serve: Callable[[ServingRole, AsyncSession], None]) -> Iterator[None]:
        """Around the loop: each role's ``serve`` runs in a thread of its own, beside generation."""

        def run(role: ServingRole) -> None:
            try:
                serve(role, self)
            except BaseException as error:  # raised to the actor's loop by check()
                self.loops.error = self.loops.error or error

        with self.streaming():
            try:
                for role in self.roles:
                    thread = threading.Thread(target=run, args=(role,), name=role.name, daemon=True)
                    self.loops.threads.append(thread)
                    thread.start()
                yield
            finally:
                self.loops.stopping.set()
                for thread in self.loops.threads:
                    thread.join(_JOIN_S)

    def check(self) -> None:
        """Raise what ended a loop, if anything did."""
        super().check()
        if self.loops.error is not None:
            raise self.loops.error

    @property
    def before_training(self) -> tuple[BatchStage, ...]:
        """The planned stages that the actor's loop runs on a complete partition: training a critic."""
        return tuple(stage for stage in self.stages if stage.changes_weights)

    def partitions(self) -> Iterator[int]:
        """The partitions that a serving role works through."""
        yield from range(self.progress.step, self.progress.last)

    def lend(self, role: ServingRole, partition: int) -> Iterator[tuple[Lease, DataProto]]:
        """Groups of ``partition`` as they get the columns that ``role`` reads; ends with the partition or the run."""
        names = list(dict.fromkeys([*role.columns, "reward_valid", "response_mask"]))
        while not self.loops.stopping.is_set():
            try:
                lease = self.plane.take(
                    role.name, names, role.groups, timeout=_TICK_S, partition=partition, consumer=role.name
                )
            except DeadlineError:
                continue  # the actor's loop watches how long this takes, and says who is to blame
            if lease is None:
                return
            batch = self.plane.get(lease.tickets, names)
            yield lease, without_samples(batch, ~batch.dense("reward_valid"))

    @contextmanager
    def scoring(self, partition: int, stage: str) -> Iterator[None]:
        """Around a stage of a serving role: its time is the partition's, also where it works ahead of the actor."""
        begun, counted = time.perf_counter(), self.clock()
        yield
        self.loops.seconds[partition, stage] += self.clock() - counted
        self.log.span(stage, begun, time.perf_counter(), threading.current_thread().name)

    def end_step(self, step: int, batch: DataProto, update: dict[str, float]) -> None:
        """See ``StreamingSession.end_step``; the times of the serving roles are gathered too."""
        super().end_step(step, batch, update)
        for partition, stage in [key for key in list(self.loops.seconds) if key[0] == step]:
            self.progress.beside[f"time/{stage}"] = self.loops.seconds.pop((partition, stage))
        self.loops.told.pop(step - 1, None)

    def _parts(self, root: Path, step: int) -> dict[str, Path]:
        """See ``Session._parts``; the weights of a reference that moves are one."""
        parts = super()._parts(root, step)
        for model in self.models:
            if model.name == REFERENCE and is_part(self.config, step):
                parts[REFERENCE] = write_reference(model, self.config, step, root)
        return parts

    def causes(self, partition: int) -> str:
        """See ``StreamingSession.causes``; roles that wait for weights are named."""
        waiting = [
            f"{model.name} waits for weights version {model.awaited} or newer, it has {model.version}"
            for model in self.models
            if model.awaited is not None
        ]
        return "; ".join([super().causes(partition), *waiting])

    def give(self, role: ServingRole, lease: Lease, batch: DataProto) -> None:
        """Put the columns that ``role`` gives into the plane, and acknowledge the groups."""
        columns = batch.select(*role.gives, "group_ids", "sample_index")
        if "advantages" in role.gives:
            self.loops.told[lease.tickets[0].partition] = self.composite.advantages.told()
        self.plane.put(lease.tickets, columns, timeout=self.config.execution.deadline_s)
        self.plane.acknowledge(lease)

    @property
    def told(self) -> AdvantageReport:
        """See ``Session.told``."""
        return self.loops.told.get(self.progress.step - 1) or super().told

    def complete(self, partition: int) -> DataProto:
        """The partition in canonical order, with every column that the train call needs.

        Raises ``RewardError`` where not one sample has a reward.
        """
        given = [name for role in self.roles for name in role.gives]
        names = list(dict.fromkeys([*self.group_columns(), *given]))
        with self.log.timed("wait"):
            lease = self.next_groups(partition, 0, names, "canonical", self.config.data.train_batch_size)
        self.rollout_workers.require_rewards(partition)
        batch = self.plane.get(lease.tickets, names)
        check_lag(batch, partition, self.max_staleness)
        self.plane.acknowledge(lease)
        batch.tokenizer = self.composite.tokenizer
        return without_samples(batch, ~batch.dense("reward_valid"))
