"""The rollout loops of a run, one for each engine, as one role that outlives the death of an engine."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tandem.base.deadline import Deadline
from tandem.base.errors import EngineDiedError, StarvationError, sentences
from tandem.dataflow.gate import Gate
from tandem.reward.outcome import Scores
from tandem.roles.rollout.causes import silence
from tandem.roles.rollout.engine_pool import EnginePool
from tandem.roles.rollout.filling import first_failure, require_rewards
from tandem.roles.rollout.utilization import Work
from tandem.roles.rollout.worker import RolloutWorker
from tandem.rollout.process import HostedEngine
from tandem.rollout.protocol import Supervised
from tandem.weights.sync import Receiver, WeightSync

logger = logging.getLogger(__name__)

_TICK_S = 0.2  # between looks at an engine that starts
_REST_S = 600.0
_JOIN_S = 2.0  # for a loop that was asked to end


class RolloutWorkers:
    """``workers`` are the loops at work, ``pool`` their engines, ``publisher`` brings them weights.

    The loop of an engine that dies leaves its tickets to the others. ``restart`` starts the engine again, at most
    ``max_restarts`` times each; it gets tickets once it has loaded the version of the day. One death more is raised by
    ``check``, and so is that of an engine that never took an order: it would end so each time. All methods are
    for one thread, that of the actor's loop.
    """

    def __init__(
        self,
        workers: Iterable[RolloutWorker],
        pool: EnginePool,
        gate: Gate,
        publisher: WeightSync,
        *,
        restart: Callable[[str], RolloutWorker],
        receiver: Callable[[RolloutWorker], Receiver],
        max_restarts: int,
    ) -> None:
        self.alive = list(workers)
        self.counts: Counter[str] = Counter()
        self.report: dict[str, float] = {}
        self.publisher = publisher
        self._pool, self._gate = pool, gate
        self._restart, self._receiver, self._max_restarts = restart, receiver, max_restarts
        self._everyone = list(self.alive)  # those of dead engines too: they may still have something to report
        self._starting: dict[str, RolloutWorker] = {}
        self._deaths: Counter[str] = Counter()
        self._resting = False

    def start(self) -> None:
        """Start the loops of all workers."""
        for worker in self.alive:
            worker.start()

    def stop(self, seconds: float) -> None:
        """End all loops and engines; groups that are being made are given up."""
        for worker in self._everyone:
            worker.stop()
        for worker in self._everyone:  # an engine that is ended ends the loop that waits for it
            if isinstance(worker.engine, Supervised):
                worker.engine.close()
        for worker in self._everyone:
            worker.join(seconds)

    def rest(self) -> None:
        """Let nothing be generated until ``work``."""
        self._resting = True
        for worker in self.alive:
            worker.rest(_REST_S)

    def work(self) -> None:
        """End the rest: every worker asks for tickets again."""
        self._resting = False
        for worker in self.alive:
            worker.work()

    def check(self) -> None:
        """Replace engines that have died and take back those that have started; raise what ended a loop or a push."""
        for worker in list(self.alive):
            try:
                worker.check()
            except EngineDiedError as error:
                self._replace(worker, error)
        for worker in self._everyone:
            if worker.error is not None and not isinstance(worker.error, EngineDiedError):
                raise worker.error
        try:
            self.publisher.check()
        except EngineDiedError as error:
            self._handle_death(error)
        for name, worker in list(self._starting.items()):
            self._readmit(name, worker)

    def gather(self, seconds: float) -> None:
        """Return once every engine is there, with the weights that were published last."""
        deadline = Deadline(seconds)
        self.check()
        while self._starting:
            deadline.check("all rollout engines to be there", f"{', '.join(self._starting)}, starting again")
            time.sleep(_TICK_S)
            self.check()
        self.settle()

    def publish(self, version: int) -> dict[str, float]:
        """Call ``WeightSync.push``, whichever engines die on the way; if one does, only its phases after the
        snapshot.
        """
        while True:
            try:
                if self.publisher.version != version:
                    self._await_starts()
                    return self.publisher.push(version)
                self.publisher.wait()
                return self.publisher.arrived
            except EngineDiedError as error:
                self._handle_death(error)

    def swap(self, change: Callable[[], None], version: int, seconds: float) -> dict[str, float]:
        """Put other engines in place of these and publish ``version``; after ``change`` they are what ``restart``
        starts.

        What is being generated is finished before, within ``seconds``, so that no ticket is lost, and the new ones get
        none before they have the weights and have been asked what they generate with.
        """
        self.gather(seconds)
        resting, old = self._resting, list(self.alive)
        for worker in old:
            worker.rest(seconds)
        for worker in old:
            self._retire(worker)
        change()
        for worker in old:
            self._gate.join(worker.name)
            self.alive.append(self._restart(worker.name))
        self._everyone += self.alive
        self._await_starts()
        for worker in self.alive:
            self._pool.engines[worker.name] = worker.engine
            self.publisher.join(worker.name, self._receiver(worker))
            if resting:
                worker.rest(_REST_S)
                worker.engine.sleep()
        phases = self.publish(version)
        self.settle()
        for worker in self.alive:
            worker.start()
        return phases

    def _retire(self, worker: RolloutWorker) -> None:
        """End a worker that has nothing left to do, and its engine."""
        worker.stop()
        if isinstance(worker.engine, Supervised):
            worker.engine.close()
        worker.join(seconds=_JOIN_S)
        self._gate.leave(worker.name)
        self.alive.remove(worker)
        self.publisher.leave(worker.name)
        del self._pool.engines[worker.name]

    def _await_starts(self) -> None:
        """Wait until every engine takes orders: a start has a limit of its own, and is no part of a push."""
        for worker in list(self.alive):
            if isinstance(worker.engine, HostedEngine):
                worker.engine.wait_until_ready()

    def settle(self) -> None:
        """Wait for the push under way, whichever engines die on the way."""
        while True:
            try:
                return self.publisher.wait()
            except EngineDiedError as error:
                self._handle_death(error)

    def report_step(self, partition: int) -> None:
        """Bring ``counts`` and ``report`` up to date: groups of ``partition`` dropped, and reports of its scorings."""
        scores = [found for worker in self._everyone for found in worker.take_scores(partition)]
        self.report = Scores.joined(scores).report() if scores else {}
        self.counts = sum((worker.take_counts(partition) for worker in self._everyone), Counter[str]())

    def require_rewards(self, partition: int) -> None:
        """Raise ``RewardError`` where not one sample of ``partition`` could be scored; all its scorings are over."""
        require_rewards([found for worker in self._everyone for found in worker.scores(partition)], partition)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Let a ``StarvationError`` inside, wherever it was met, name the first scoring that failed."""
        try:
            yield
        except StarvationError as error:
            scores = [found for worker in self._everyone for found in worker.scores()]
            raise StarvationError(f"{error}{first_failure(scores)}") from error

    def take_work(self, partition: int) -> list[tuple[str, Work]]:
        """Return what each engine did for ``partition``, by name."""
        works = [(worker.name, worker.utilization.take(partition)) for worker in self._everyone]
        return [(name, work) for name, work in works if work is not None]

    def look(self) -> tuple[float, float]:
        """Return the seconds that an engine was at work since the last look, on average, and those of the longest
        group.
        """
        seen = [worker.utilization.look() for worker in self._everyone]
        return sum(busy for busy, _ in seen) / len(self.members), max(longest for _, longest in seen)

    @property
    def members(self) -> list[RolloutWorker]:
        """The loops at work, and those whose engines are starting again."""
        return [*self.alive, *self._starting.values()]

    @property
    def starting(self) -> list[str]:
        """Engines that have died and are starting again."""
        return list(self._starting)

    def blockers(self) -> str:
        """Return who keeps the actor's loop waiting where it waits for the engines themselves, in words."""
        causes = [self.publisher.blocked_by, *(f"{name} has died and is starting again" for name in self.starting)]
        causes += [f"{worker.name} {quiet}" for worker in list(self.alive) if (quiet := silence(worker))]
        hosted = [(worker.name, worker.engine) for worker in list(self.alive)]
        causes += [f"{name} {e.starting}" for name, e in hosted if isinstance(e, HostedEngine) and e.starting]
        return "; ".join(cause for cause in causes if cause) or "its rollout engines are not done"

    # --- deaths ------------------------------------------------------------------------------------------------------

    def _handle_death(self, error: EngineDiedError) -> None:
        """Find the dead engine that a push met, and replace it."""
        dead = [worker for worker in self.alive if _is_dead(worker)]
        if not dead:
            raise error
        for worker in dead:
            self._replace(worker, error)

    def _replace(self, worker: RolloutWorker, error: EngineDiedError) -> None:
        worker.leave()
        self.alive.remove(worker)
        self._pool.engines.pop(worker.name, None)
        self.publisher.leave(worker.name)
        if isinstance(worker.engine, HostedEngine) and not worker.engine.came_up and not self._deaths[worker.name]:
            raise error
        self._start_again(worker.name, error)

    def _start_again(self, name: str, error: EngineDiedError) -> None:
        self._deaths[name] += 1
        if self._deaths[name] > self._max_restarts:
            raise error
        message = f"Its tickets go to others; it is started again ({self._deaths[name]})"
        logger.warning("%s", sentences(error, message))
        self._gate.join(name)
        worker = self._starting[name] = self._restart(name)
        self._everyone.append(worker)

    def _readmit(self, name: str, worker: RolloutWorker) -> None:
        """Give an engine that has started the weights, and then tickets."""
        engine = worker.engine
        try:
            if isinstance(engine, Supervised) and not engine.is_ready():
                return
            self.publisher.join(name, self._receiver(worker))
            if self._resting:
                worker.rest(_REST_S)
                engine.sleep()
        except EngineDiedError as error:
            worker.leave()
            self._start_again(name, error)
            return
        del self._starting[name]
        self._pool.engines[name] = engine
        self.alive.append(worker)
        worker.start()


def _is_dead(worker: RolloutWorker) -> bool:
    try:
        worker.check()
        if isinstance(worker.engine, Supervised):
            worker.engine.check()
    except EngineDiedError:
        return True
    return False
