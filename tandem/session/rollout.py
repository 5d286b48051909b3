"""Generation as the loops have it: engines in turns with the actor, or rollout workers beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from tandem.columns.proto import DataProto
from tandem.dataflow.gate import AtGate, Gate
from tandem.dataflow.store import DataPlane, Monitored
from tandem.observe.run_log import RunLog
from tandem.observe.status.status import EngineLine, Status, Wait
from tandem.reward.outcome import share_scored
from tandem.roles.actor import Actor
from tandem.roles.reward import RewardManager
from tandem.roles.rollout.causes import being_scored, cause_of_stall, engine_causes
from tandem.roles.rollout.filling import Rollout
from tandem.roles.rollout.spare_groups import SpareGroups
from tandem.roles.rollout.utilization import ScoringWait, StepClock, wall
from tandem.roles.rollout.worker import RolloutWorker
from tandem.roles.rollout.workers import RolloutWorkers
from tandem.rollout.protocol import RolloutEngine
from tandem.session.progress import Progress, StepPart
from tandem.session.stage_table import require_listed
from tandem.session.waits import Waits
from tandem.stages.stage import PlannedStage, Stage
from tandem.stages.table import generate, score

_TICK_S = 0.5  # between looks at the workers while waiting for them
_NOWHERE = AtGate(None, "", ())  # of an engine that the gate doesn't know
_JOIN_S = 2.0  # for a worker that was asked to end


class Tally(Protocol):
    """What the rollout reports of itself: groups dropped by reason, and the scorer's own metrics. ``RolloutWorkers``
    has one.
    """

    counts: Counter[str]
    report: dict[str, float]


class Reported(StepPart):
    """What was dropped, what the scorer reported, and what it could not score; of ``spares``, what was taken."""

    def __init__(self, tally: Tally, rewards: RewardManager, spares: SpareGroups | None) -> None:
        self._tally, self._rewards, self._spares = tally, rewards, spares

    def metrics(self, batch: DataProto, step: int) -> dict[str, float]:
        report = self._tally.report
        found = {f"reward/{name}": value for name, value in (report | share_scored(report)).items()}
        found |= {f"dropped/{name}": float(count) for name, count in self._tally.counts.items()}
        self._tally.counts.clear()
        return found if self._spares is None else found | self._spares.report(step)

    def summary(self) -> dict[str, str]:
        failures = self._rewards.failures
        return {"rewards": str(failures)} if failures.failed else {}


def engine_line(name: str, at: AtGate, state: str) -> EngineLine:
    """Return what a status says of an engine that the gate sees ``at``, and that is in this ``state`` of work."""
    return EngineLine(name, f"{state}, paused: {at.paused}" if at.paused else state, at.version, at.tickets)


class TimeSharing:
    """Actor and rollout engine on the same devices: one works, the other's memory is given up."""

    def __init__(
        self,
        actor: Actor,
        engine: RolloutEngine,
        log: RunLog,
        *,
        offload_train: bool = True,
        offload_rollout: bool = True,
    ) -> None:
        self._actor, self._engine, self._log = actor, engine, log
        self._offload_train, self._offload_rollout = offload_train, offload_rollout

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Give the engine its turn; what taking it and giving it back cost is a part of the step."""
        with self._log.timed("turns"):
            self._to_engine()
        yield
        with self._log.timed("turns"):
            self._to_actor()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Give the engine a turn between steps."""
        self._to_engine()
        yield
        self._to_actor()

    def _to_engine(self) -> None:
        if self._offload_train:
            self._actor.sleep()
        self._engine.wake()

    def _to_actor(self) -> None:
        if self._offload_rollout:
            self._engine.sleep()
        if self._offload_train:
            self._actor.wake()


class SharedRollout(Reported):
    """One engine that generates with the actor's own parameters, in turns with it and in its loop."""

    def __init__(
        self, rollout: Rollout, sharing: TimeSharing, rewards: RewardManager, spares: SpareGroups | None = None
    ) -> None:
        super().__init__(rollout, rewards, spares)
        self.filler, self._sharing = rollout, sharing
        self._filled_s = 0.0

    def generating(self) -> AbstractContextManager[None]:
        """Return the engine's turn on the devices."""
        return self._sharing.generating()

    def report_status(self, status: Status) -> None:
        """Add the engine, which has the actor's own weights."""
        status.engines += [
            engine_line(name, at, "in turns with the actor") for name, at in self.filler.engines().items()
        ]

    def fill(self, partition: int) -> None:
        """Return once every ticket of ``partition`` is filled, generated and scored, and it is sealed.

        Raises ``RewardError`` where not one sample could be scored.
        """
        begun = wall()
        self.filler.fill(partition)
        self._filled_s = wall() - begun

    def times(self, step: int) -> dict[str, float]:
        """Return the seconds of generation, and those after it in which scores were waited for."""
        waited = self.filler.scoring_wait.look()
        return {generate.time_key: max(0.0, self._filled_s - waited), score.time_key: waited}

    def require_rewards(self, partition: int) -> None:
        """Do nothing: ``fill`` has refused a partition without rewards."""


class Workers(Reported):
    """Rollout workers, each with an engine of its own, that go on beside the actor's loop.

    ``clock`` and ``scoring`` measure what they do within the steps of the run, and how long they wait for scores;
    ``lanes``:
    partitions that may be under way at once; ``stages``: what they do.
    """

    def __init__(
        self,
        workers: RolloutWorkers,
        rewards: RewardManager,
        plane: DataPlane,
        gate: Gate,
        clock: StepClock,
        scoring: ScoringWait,
        progress: Progress,
        waits: Waits,
        log: RunLog,
        *,
        lanes: int,
        stages: Sequence[PlannedStage],
        spares: SpareGroups | None = None,
    ) -> None:
        super().__init__(workers, rewards, spares)
        self.workers, self.gate, self.clock, self._scoring = workers, gate, clock, scoring
        self._plane, self._progress, self._waits, self._log = plane, progress, waits, log
        self._lanes, self._stages = lanes, stages
        self._done: dict[str, float] = {}

    @property
    def alive(self) -> list[RolloutWorker]:
        """The workers whose loops are running."""
        return self.workers.alive

    @contextmanager
    def working(self, *stages: Stage) -> Iterator[None]:
        """Start generation and scoring with the loop, and end them with it."""
        require_listed(self._stages, stages, "the rollout workers")
        try:
            self.workers.start()
            with self.workers.explaining():
                yield
            with self.awaiting("ending"):
                self.workers.settle()
        finally:
            self.workers.stop(_JOIN_S)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate: all engines are there, with the weights that were published last; they go on beside."""
        with self.awaiting("evaluating"):
            self.workers.gather(self._waits.deadline_s)
        yield

    def require_rewards(self, partition: int) -> None:
        """Raise ``RewardError`` where not one sample of ``partition`` could be scored."""
        self.workers.require_rewards(partition)

    def pushing(self) -> AbstractContextManager[None]:
        """Return a context around a push of weights, whose seconds are no wait for scores."""
        return self._scoring.pushing()

    def awaiting(self, what: str) -> AbstractContextManager[Callable[[], str]]:
        """Return a context around a wait of the actor's loop for the engines themselves."""

        def cause() -> str:
            silent = self._plane.silent(_TICK_S) if isinstance(self._plane, Monitored) else []
            return self._waits.silent() or "; ".join(silent) or self.workers.blockers()

        return self._waits.stall_warning(f"(rollout_id={self._progress.step}) {what}", cause)

    def check(self) -> None:
        """Raise what ended the rollout workers; engines that have died are replaced."""
        self.workers.check()

    def causes(self, partition: int) -> str:
        """Return which engine or gate the partition waits for, in words."""
        workers = self.workers
        return cause_of_stall(self._plane, self.gate, workers.members, partition, workers.starting)

    def report_status(self, status: Status) -> None:
        """Add the engines, what each is held up by, scorings, and the push under way."""
        members, starting, there = list(self.workers.members), self.workers.starting, self.gate.engines()
        for worker in members:
            causes, at = engine_causes(self.gate, worker, starting), there.get(worker.name, _NOWHERE)
            work = f"generating {worker.generating} groups" if worker.generating else "nothing to generate"
            status.engines.append(engine_line(worker.name, at, work))
            if causes:
                status.waits.append(Wait(worker.name, "; ".join(causes)))
        status.waits += [Wait("scoring", doing) for doing in being_scored(members)]
        if pushing := self.workers.publisher.blocked_by:
            status.waits.append(Wait("the push of weights", pushing))

    def end_step(self, step: int) -> None:
        self._plane.seal(step, timeout=0.0)
        self.workers.report_step(step)
        self._done = self._work_for(step)

    def times(self, step: int) -> dict[str, float]:
        """Return the seconds that an engine worked in the step and for its partition, on average, in which all of them
        waited for scores, and of the longest groups.
        """
        busy, longest = self.workers.look()
        waited = {score.time_key: self._scoring.look()}
        return {**self._done, generate.time_key: busy, **waited, "rollout/longest_ended_s": longest}

    def _work_for(self, partition: int) -> dict[str, float]:
        """Return what was done for ``partition``, whenever that was."""
        done = self.workers.take_work(partition)
        for name, work in done:
            lane = f"{name}, {partition % self._lanes}"
            self._log.span(f"generate train_{partition}", work.begun, work.ended, lane)
        seconds = sum(work.seconds for _, work in done) / len(self.workers.members)
        return {"rollout/work_s": seconds, "rollout/longest_s": max((work.longest for _, work in done), default=0.0)}


class RestingWorkers(StepPart):
    """Rollout workers in colocate: they rest while the actor has its turn on the devices."""

    def __init__(
        self, workers: Workers, sharing: TimeSharing, engines: RolloutEngine, plane: DataPlane, waits: Waits
    ) -> None:
        self._workers, self._sharing, self._engines = workers, sharing, engines
        self._plane, self._waits = plane, waits

    @property
    def alive(self) -> list[RolloutWorker]:
        """The workers whose loops are running."""
        return self._workers.alive

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the workers, which rest at first."""
        self._workers.workers.rest()
        self._engines.sleep()
        with self._workers.working(generate, score):
            yield

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Give the engines their turn on the devices."""
        with self._sharing.generating():
            self._workers.workers.work()
            yield
            with self._workers.awaiting("resting its engines"):
                self._workers.workers.rest()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Give the engines their turn, but the workers rest: they would begin the next partition."""
        with self._workers.evaluating(), self._sharing.evaluating():
            yield

    def fill(self, partition: int) -> None:
        """Wait until the partition is sealed, and refuse one without any reward."""
        self._waits.until(lambda: self._plane.seal(partition, timeout=_TICK_S), partition)
        self.require_rewards(partition)

    def require_rewards(self, partition: int) -> None:
        """Raise where no sample of the partition could be scored."""
        self._workers.require_rewards(partition)
