"""The live handles of the modes in which generation goes on while the actor trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tandem.base.errors import DeadlineError
from tandem.columns.proto import DataProto
from tandem.dataflow.gatekeeper import GateKeeper
from tandem.dataflow.partition import Order
from tandem.dataflow.tickets import Lease
from tandem.roles.batch_metrics import check_lag
from tandem.roles.loss import without_samples
from tandem.roles.rollout.utilization import StepClock
from tandem.roles.rollout.worker import RolloutWorker, cause_of_stall
from tandem.roles.rollout.workers import RolloutWorkers
from tandem.roles.update import UPDATES, Update
from tandem.session.session import Session
from tandem.session.stall_warning import telling
from tandem.stages.stage import BatchStage

T = TypeVar("T")

_TICK_S = 0.5  # between looks at the loops while waiting for data
_JOIN_S = 2.0  # for a loop that is told to end


@dataclass(frozen=True)
class StreamingSession(Session):
    """A session whose rollout engines work in loops of their own. ``keeper`` is the gate behind its lock; ``clock``
    measures what goes on beside the actor's loop."""

    keeper: GateKeeper
    rollout_workers: RolloutWorkers
    clock: StepClock
    sub_batches: int

    @property
    def streams(self) -> list[RolloutWorker]:
        """The loops at work."""
        return self.rollout_workers.streams

    @property
    def forwards(self) -> tuple[BatchStage, ...]:
        """The planned stages that a sub-batch goes through as it arrives."""
        return tuple(stage for stage in self.stages if stage.phase == "sub_batch")

    @property
    def merged(self) -> tuple[BatchStage, ...]:
        """The planned stages that see the whole partition."""
        return tuple(stage for stage in self.stages if stage.phase == "partition")

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Around the loop: generation starts with it and ends with it."""
        try:
            self.rollout_workers.start()
            with self.rollout_workers.explaining():
                yield
            with self._awaiting("ending"):
                self.rollout_workers.settle()
            self._draw_pushes()
        finally:
            self.rollout_workers.stop(_JOIN_S)

    def counting(self) -> AbstractContextManager[None]:
        """See ``Stepping.counting``."""
        return self.clock.running()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """See ``Session.evaluating``; generation goes on beside it."""
        with self._awaiting("evaluating"):
            self.rollout_workers.gather(self.config.execution.deadline_s)
        yield

    def fill(self, partition: int) -> None:
        """Wait until the loops have filled the partition."""
        self._watch(partition, 0, lambda: self.plane.seal(partition, timeout=_TICK_S))
        self.rollout_workers.require_rewards(partition)

    def arriving(self, partition: int, order: Order = "arrival") -> Iterator[DataProto]:
        """The sub-batches of ``partition``, each once its groups are scored; what counts in nothing is masked.

        Raises ``RewardError`` after the last one where not one sample has a reward.
        """
        names, count = self.group_columns(), self.config.data.train_batch_size // self.sub_batches
        for index in range(self.sub_batches):
            with self.log.timed("wait"):
                lease = self.next_groups(partition, index, names, order, count)
            batch = self.plane.get(lease.tickets, names)
            check_lag(batch, partition, self.max_staleness)
            batch.tokenizer = self.composite.tokenizer
            yield without_samples(batch, ~batch.dense("reward_valid"))
            self.plane.acknowledge(lease)
        self.rollout_workers.require_rewards(partition)

    def begin_update(self) -> Update:
        """An empty update of the planned kind."""
        kind = UPDATES[self.pipelining]
        return kind(self.composite.actor, self.composite.objective, self.merged, self.run)

    def publish(self, version: int) -> None:
        """Bring weights ``version`` to everyone who generates or scores with them."""
        with self._awaiting(f"publishing version {version}"):
            self.progress.push = self.rollout_workers.publish(version)
        self.progress.beside["push/bytes"] = float(self.rollout_workers.publisher.nbytes)

    def end_step(self, step: int, batch: DataProto, update: dict[str, float]) -> None:
        """See ``Session.end_step``; what the rollout loops did for the step is gathered too."""
        self.plane.seal(step, timeout=0.0)
        self.rollout_workers.tell(step)
        self.progress.beside = self._generated(step)
        self._draw_pushes()
        super().end_step(step, batch, update)

    def _generated(self, partition: int) -> dict[str, float]:
        """Seconds that an engine worked for ``partition``, on average, whenever that was, and its longest group."""
        done = self.rollout_workers.take_work(partition)
        lanes = self.max_staleness + 1  # partitions that may be under way at once
        for name, work in done:
            self.log.span(f"generate train_{partition}", work.begun, work.ended, f"{name}, {partition % lanes}")
        seconds = sum(work.seconds for _, work in done) / len(self.rollout_workers.members)
        return {"rollout/work_s": seconds, "rollout/longest_s": max((work.longest for _, work in done), default=0.0)}

    def _times(self) -> dict[str, float]:
        """See ``Session._times``; what the engines did in the step is told too."""
        busy, longest = self.rollout_workers.look()
        self.progress.beside |= {"time/rollout": busy, "rollout/longest_ended_s": longest}
        return super()._times()

    def _draw_pushes(self) -> None:
        """Put the pushes that have arrived into the timeline."""
        for name, version, begun, ended in self.rollout_workers.publisher.take_arrivals():
            self.log.span(f"push {version}", begun, ended, f"weights to {name}")

    def check(self) -> None:
        """Raise what ended a loop, a push or a rank, if anything did; replace engines that have died."""
        self.rollout_workers.check()
        self.composite.actor.ranks.check()
        if self.composite.critic is not None:
            self.composite.critic.ranks.check()

    def next_groups(self, partition: int, index: int, names: list[str], order: Order, count: int) -> Lease:
        """Wait for ``count`` groups. Warns with the cause after ``stall_warning_s``; gives up after ``deadline_s``."""

        def take() -> Lease:
            lease = self.plane.take(
                "train", names, count, timeout=_TICK_S, partition=partition, order=order, consumer="actor"
            )
            assert lease is not None  # a partition is consumed once
            return lease

        return self._watch(partition, index, take)

    def _watch(self, partition: int, index: int, attempt: Callable[[], T]) -> T:
        """Repeat ``attempt`` while it raises ``DeadlineError`` after a moment, and watch everyone meanwhile."""
        execution, started = self.config.execution, time.monotonic()
        place, cause = f"(rollout_id={partition}) batch_index={index}", partial(self.causes, partition)
        with self._telling(place, cause) as told:
            while True:
                self.check()
                with suppress(DeadlineError):
                    return attempt()
                if time.monotonic() - started >= execution.deadline_s:
                    raise DeadlineError(told())

    def _telling(self, doing: str, cause: Callable[[], str]) -> AbstractContextManager[Callable[[], str]]:
        """Around a wait of the loop, in which it is ``doing`` that: one that takes long is told, with its cause."""
        return telling(self.config.execution.stall_warning_s, f"{self.loop_name}{doing}", cause)

    def _awaiting(self, what: str) -> AbstractContextManager[Callable[[], str]]:
        """``_telling`` around a wait for the engines themselves."""
        return self._telling(f"(rollout_id={self.progress.step}) {what}", self.rollout_workers.blockers)

    def causes(self, partition: int) -> str:
        """Why ``partition`` isn't ready, in words."""
        rollout_workers = self.rollout_workers
        return cause_of_stall(self.plane, self.keeper, rollout_workers.members, partition, rollout_workers.starting)

    @property
    def order(self) -> Order:
        """Slices that are optimizer steps are fixed by ticket: else short samples would always come first."""
        return "canonical" if self.pipelining == "step" else "arrival"

    @property
    def loop_name(self) -> str:
        """What the stall warning calls the loop."""
        return f"train_{self.plan.mode}"

    @property
    def pipelining(self) -> str:
        """``execution.train_pipelining``, off in modes without it."""
        execution = self.config.execution
        return execution.train_pipelining if execution.mode == "hybrid" else "off"
