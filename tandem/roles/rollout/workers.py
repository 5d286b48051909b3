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
from tandem.roles.rollout.engine_pool import EnginePool
from tandem.roles.rollout.filling import first_failure, require_rewards
from tandem.roles.rollout.utilization import Work
from tandem.roles.rollout.worker import RolloutWorker, silence
from tandem.rollout.process import HostedEngine
from tandem.rollout.protocol import Supervised
from tandem.weights.sync import Receiver, WeightSync

logger = logging.getLogger(__name__)

_TICK_S = 0.2  # between looks at an engine that starts
_REST_S = 600.0


class RolloutWorkers:
    """``streams`` are the loops at work, ``pool`` their engines, ``publisher`` brings them weights.

    The loop of an engine that dies leaves its tickets to the others. ``restart`` starts the engine again, at most
    ``max_restarts`` times each; it gets tickets once it has loaded the version of the day. One death more is raised by
    ``check``, and so is that of an engine that never took an order: it would end so each time. All methods are
    for one thread, that of the actor's loop.
    """

    def __init__(
        self,
        streams: Iterable[RolloutWorker],
        pool: EnginePool,
        gate: Gate,
        publisher: WeightSync,
        *,
        restart: Callable[[str], RolloutWorker],
        receiver: Callable[[RolloutWorker], Receiver],
        max_restarts: int,
    ) -> None:
        self.streams = list(streams)
        self.counts: Counter[str] = Counter()
        self.report: dict[str, float] = {}
        self.publisher = publisher
        self._pool, self._gate = pool, gate
        self._restart, self._receiver, self._max_restarts = restart, receiver, max_restarts
        self._everyone = list(self.streams)  # those of dead engines too: they may still have something to report
        self._starting: dict[str, RolloutWorker] = {}
        self._deaths: Counter[str] = Counter()
        self._resting = False

    def start(self) -> None:
        """Start the loops of all workers."""
        for stream in self.streams:
            stream.start()

    def stop(self, seconds: float) -> None:
        """End all loops and engines; groups that are being made are given up."""
        for stream in self._everyone:
            stream.stop()
        for stream in self._everyone:  # an engine that is ended ends the loop that waits for it
            if isinstance(stream.engine, Supervised):
                stream.engine.close()
        for stream in self._everyone:
            stream.join(seconds)

    def rest(self) -> None:
        """Let nothing be generated until ``work``."""
        self._resting = True
        for stream in self.streams:
            stream.rest(_REST_S)

    def work(self) -> None:
        """End the rest: every worker asks for tickets again."""
        self._resting = False
        for stream in self.streams:
            stream.work()

    def check(self) -> None:
        """Replace engines that have died and take back those that have started; raise what ended a loop or a push."""
        for stream in list(self.streams):
            try:
                stream.check()
            except EngineDiedError as error:
                self._replace(stream, error)
        for stream in self._everyone:
            if stream.error is not None and not isinstance(stream.error, EngineDiedError):
                raise stream.error
        try:
            self.publisher.check()
        except EngineDiedError as error:
            self._handle_death(error)
        for name, stream in list(self._starting.items()):
            self._readmit(name, stream)

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

    def _await_starts(self) -> None:
        """Wait until every engine takes orders: a start has a limit of its own, and is no part of a push."""
        for stream in list(self.streams):
            if isinstance(stream.engine, HostedEngine):
                stream.engine.wait_until_ready()

    def settle(self) -> None:
        """Wait for the push under way, whichever engines die on the way."""
        while True:
            try:
                return self.publisher.wait()
            except EngineDiedError as error:
                self._handle_death(error)

    def report_step(self, partition: int) -> None:
        """Bring ``counts`` and ``report`` up to date: groups of ``partition`` dropped, and reports of its scorings."""
        scores = [found for stream in self._everyone for found in stream.take_scores(partition)]
        self.report = Scores.joined(scores).report() if scores else {}
        self.counts = sum((stream.take_counts(partition) for stream in self._everyone), Counter[str]())

    def require_rewards(self, partition: int) -> None:
        """Raise ``RewardError`` where not one sample of ``partition`` could be scored; all its scorings are over."""
        require_rewards([found for stream in self._everyone for found in stream.scores(partition)], partition)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Let a ``StarvationError`` inside, wherever it was met, name the first scoring that failed."""
        try:
            yield
        except StarvationError as error:
            scores = [found for stream in self._everyone for found in stream.scores()]
            raise StarvationError(f"{error}{first_failure(scores)}") from error

    def take_work(self, partition: int) -> list[tuple[str, Work]]:
        """Return what each engine did for ``partition``, by name."""
        works = [(stream.name, stream.utilization.take(partition)) for stream in self._everyone]
        return [(name, work) for name, work in works if work is not None]

    def look(self) -> tuple[float, float]:
        """Return the seconds that an engine was at work since the last look, on average, and those of the longest
        group.
        """
        seen = [stream.utilization.look() for stream in self._everyone]
        return sum(busy for busy, _ in seen) / len(self.members), max(longest for _, longest in seen)

    @property
    def members(self) -> list[RolloutWorker]:
        """The loops at work, and those whose engines are starting again."""
        return [*self.streams, *self._starting.values()]

    @property
    def starting(self) -> list[str]:
        """Engines that have died and are starting again."""
        return list(self._starting)

    def blockers(self) -> str:
        """Return who keeps the actor's loop waiting where it waits for the engines themselves, in words."""
        causes = [self.publisher.blocked_by, *(f"{name} has died and is starting again" for name in self.starting)]
        causes += [f"{stream.name} {quiet}" for stream in list(self.streams) if (quiet := silence(stream))]
        hosted = [(stream.name, stream.engine) for stream in list(self.streams)]
        causes += [f"{name} {e.starting}" for name, e in hosted if isinstance(e, HostedEngine) and e.starting]
        return "; ".join(cause for cause in causes if cause) or "its rollout engines are not done"

    # --- deaths ------------------------------------------------------------------------------------------------------

    def _handle_death(self, error: EngineDiedError) -> None:
        """Find the dead engine that a push met, and replace it."""
        dead = [stream for stream in self.streams if _is_dead(stream)]
        if not dead:
            raise error
        for stream in dead:
            self._replace(stream, error)

    def _replace(self, stream: RolloutWorker, error: EngineDiedError) -> None:
        stream.leave()
        self.streams.remove(stream)
        self._pool.engines.pop(stream.name, None)
        self.publisher.leave(stream.name)
        if isinstance(stream.engine, HostedEngine) and not stream.engine.came_up and not self._deaths[stream.name]:
            raise error
        self._start_again(stream.name, error)

    def _start_again(self, name: str, error: EngineDiedError) -> None:
        self._deaths[name] += 1
        if self._deaths[name] > self._max_restarts:
            raise error
        message = f"Its tickets go to others; it is started again ({self._deaths[name]})"
        logger.warning("%s", sentences(error, message))
        self._gate.join(name)
        stream = self._starting[name] = self._restart(name)
        self._everyone.append(stream)

    def _readmit(self, name: str, stream: RolloutWorker) -> None:
        """Give an engine that has started the weights, and then tickets."""
        engine = stream.engine
        try:
            if isinstance(engine, Supervised) and not engine.is_ready():
                return
            self.publisher.join(name, self._receiver(stream))
            if self._resting:
                stream.rest(_REST_S)
                engine.sleep()
        except EngineDiedError as error:
            stream.leave()
            self._start_again(name, error)
            return
        del self._starting[name]
        self._pool.engines[name] = engine
        self.streams.append(stream)
        stream.start()


def _is_dead(stream: RolloutWorker) -> bool:
    try:
        stream.check()
        if isinstance(stream.engine, Supervised):
            stream.engine.check()
    except EngineDiedError:
        return True
    return False
