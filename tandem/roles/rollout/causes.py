"""Why a partition isn't ready, and what an engine is held up by, in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress

from tandem.base.errors import TandemError
from tandem.dataflow.gate import Closed, Gate
from tandem.dataflow.store import DataPlane, Monitored
from tandem.roles.rollout.worker import RolloutWorker
from tandem.rollout.connection import QUIET_S
from tandem.rollout.process import HostedEngine
from tandem.rollout.protocol import Heartbeat

_ANSWER_S = 2.0  # for the parts of the data plane to give a sign of life


def cause_of_stall(
    plane: DataPlane,
    gate: Gate,
    rollouts: Iterable[RolloutWorker],
    partition: int,
    starting: Collection[str] = (),
) -> str:
    """Return why a partition isn't ready, in words: parts of the data plane that don't answer; else what is unfilled,
    who scores, is paused or silent, what the gate awaits.

    The engines of ``starting`` have died.
    """
    silent = plane.silent(_ANSWER_S) if isinstance(plane, Monitored) else []
    if silent:
        return "; ".join(silent)  # what else is late is late because of them, and nobody can be asked
    causes = []
    status = plane.status().partitions
    if partition in status:
        causes.append(status[partition].blocker("train", gone=starting))
    else:
        causes.append(f"partition {partition}: nothing was put yet")
    rollouts = list(rollouts)
    causes += [f"scoring: {doing}" for doing in being_scored(rollouts)]
    for rollout in rollouts:
        causes += [f"{rollout.name} {cause}" for cause in engine_causes(gate, rollout, starting)]
    return "; ".join(causes)


def being_scored(rollouts: Iterable[RolloutWorker]) -> list[str]:
    """Return who scores what the engines have generated, in words; one pool serves them all."""
    return sorted({doing for rollout in rollouts if (doing := rollout.scoring) is not None})


def engine_causes(gate: Gate, rollout: RolloutWorker, starting: Collection[str] = ()) -> list[str]:
    """Return what holds an engine up, in words that go on after its name."""
    if rollout.name in starting:
        return ["has died and is starting again"]
    if isinstance(rollout.engine, HostedEngine) and rollout.engine.starting:
        return [rollout.engine.starting]
    causes = []
    if quiet := silence(rollout):
        causes.append(quiet)
    if outside := rollout.outside:
        causes.append(f"has episodes outside: {outside}")
    with suppress(TandemError):
        closed: Closed | None = gate.closed(rollout.name)
        if closed is not None and not closed.exhausted:
            causes.append(f"gets no ticket: {closed}")
    return causes


def silence(rollout: RolloutWorker) -> str:
    """Return the words that tell for how long the engine gave no sign of life; none of one that does."""
    silent_s = rollout.engine.silent_s() if isinstance(rollout.engine, Heartbeat) else 0.0
    return f"gave no sign of life for {silent_s:.0f} s" if silent_s > QUIET_S else ""
