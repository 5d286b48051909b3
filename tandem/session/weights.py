"""How new weights reach everyone who generates or scores with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.observe.run_log import RunLog
from tandem.roles.actor import Actor
from tandem.roles.rollout.filling import Rollout
from tandem.rollout.protocol import RolloutEngine
from tandem.session.progress import StepPart
from tandem.session.rollout import Workers


class SharedWeights:
    """The engine generates with the actor's own parameters: a push counts, and copies nothing."""

    def __init__(self, actor: Actor, engine: RolloutEngine, rollout: Rollout) -> None:
        self._actor, self._engine, self._rollout = actor, engine, rollout

    def push(self, version: int) -> None:
        """Let generation go on under weights ``version``; the gate hears of it."""
        self._actor.require_actor("publish weights")
        self._engine.load(None, version)
        self._rollout.acknowledge(version)


@dataclass(frozen=True)
class Swap:
    """Other engines take over with the weights of ``step``, or those with which a run goes on after it: ``change`` is
    called before they are started, and those that serve have ``deadline_s`` to finish what they have."""

    step: int
    change: Callable[[], None]
    deadline_s: float


class PushedWeights(StepPart):
    """Engines, and in fully async scoring roles, have weights of their own, and are sent each version.

    ``swap``: the engines are others from some version on.
    """

    def __init__(self, workers: Workers, log: RunLog, swap: Swap | None = None) -> None:
        self._workers, self._log, self._swap = workers, log, swap
        self._seconds: dict[str, float] = {}

    def push(self, version: int) -> None:
        """Bring weights ``version`` to everyone; the gate hears of each who has them.

        With ``weight_sync.overlap`` it returns once they are copied, and the rest goes on behind the next step.
        """
        workers, swap = self._workers.workers, self._swap
        with self._workers.awaiting(f"publishing version {version}"), self._workers.pushing():
            if swap is None or version < swap.step:
                self._seconds = workers.publish(version)
            else:
                self._seconds = workers.swap(swap.change, version, swap.deadline_s)
                self._swap = None

    def end_step(self, step: int) -> None:
        self._draw()

    def times(self, step: int) -> dict[str, float]:
        """Return the last push: seconds by phase, and its size."""
        pushed = {f"time/push_{phase}": seconds for phase, seconds in self._seconds.items()}
        return {**pushed, "push/bytes": float(self._workers.workers.publisher.nbytes)}

    def finish(self, folder: Path) -> None:
        self._draw()

    def _draw(self) -> None:
        """Put the pushes that have arrived into the timeline."""
        for name, version, begun, ended in self._workers.workers.publisher.take_arrivals():
            self._log.span(f"push {version}", begun, ended, f"weights to {name}")
