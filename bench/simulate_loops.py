"""The loops of the three modes over fake work: what each consumes, produces and waits for is the real loop's."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from bench.simulate_clock import Process, Signal
from bench.simulate_world import GENERATED, SCORED, World
from tandem.dataflow.tickets import Ticket
from tandem.speed.step_bound import Parts, Setting

COLUMNS = (*GENERATED, *SCORED)


@dataclass
class Pushes:
    """The push under way, if any: at most one, and none is skipped."""

    ended: Signal
    busy: bool = False

    @classmethod
    def of(cls, world: World) -> Pushes:
        """None under way."""
        return cls(Signal(world.clock))


def start(world: World, parts: Parts, setting: Setting) -> None:
    """Spawn the loops of the setting's mode."""
    if setting.mode == "colocate":
        world.clock.spawn(colocate(world, parts, setting))
    elif setting.mode == "hybrid":
        world.clock.spawn(hybrid(world, parts, setting))
    else:
        pushes = Pushes.of(world)
        world.clock.spawn(forward(world, "ref", "ref_logprobs", parts.reference / max(1, setting.reference), setting))
        world.clock.spawn(forward(world, "old", "old_logprobs", parts.old / setting.actor_fwd, setting))
        world.clock.spawn(advantages(world, parts))
        world.clock.spawn(train(world, parts, setting, pushes))


def colocate(world: World, parts: Parts, setting: Setting) -> Process[None]:
    """Partition by partition, generation and training in turn on all devices."""
    for k in count():
        lease = yield from world.take("train", COLUMNS, world.groups, k, "canonical")
        world.acknowledge(lease)
        world.seal(k)
        yield (parts.forward + parts.train) / setting.rollout + parts.advantages
        world.retire(k, lease.tickets)
        yield from world.update_weights(k + 1, parts.turns)


def hybrid(world: World, parts: Parts, setting: Setting) -> Process[None]:
    """Sub-batches as they arrive; then advantages, the train call and the push."""
    pushes, share = Pushes.of(world), world.groups // setting.sub_batches
    forward, train = parts.forward / setting.actor, parts.train / setting.actor
    early, late = (train, 0.0) if setting.pipelined else (0.0, train)
    for k in count():
        tickets: list[Ticket] = []
        for _ in range(setting.sub_batches):
            lease = yield from world.take("train", COLUMNS, share, k, "arrival")
            yield (forward + early) / setting.sub_batches
            world.acknowledge(lease)
            tickets += lease.tickets
        world.seal(k)
        yield parts.advantages + late
        world.retire(k, tickets)
        if setting.overlap:
            yield from push_behind(world, parts, pushes, k + 1)
        else:
            yield from world.update_weights(k + 1, parts.push)


def push_behind(world: World, parts: Parts, pushes: Pushes, version: int) -> Process[None]:
    """Snapshot the weights, once the last push has ended; the rest goes on behind the next step."""
    while pushes.busy:
        yield pushes.ended
    pushes.busy = True
    yield parts.snapshot
    world.clock.spawn(_background(world, parts, pushes, version))


def _background(world: World, parts: Parts, pushes: Pushes, version: int) -> Process[None]:
    yield parts.broadcast
    yield from world.update_weights(version, parts.swap)
    pushes.busy = False
    pushes.ended.notify()


def forward(world: World, task: str, column: str, seconds: float, setting: Setting) -> Process[None]:
    """A role of fully async that adds one column, sub-batch by sub-batch."""
    for k in count():
        for _ in range(setting.sub_batches):
            lease = yield from world.take(task, GENERATED, world.groups // setting.sub_batches, k, "arrival")
            yield seconds / setting.sub_batches
            world.give(lease, (column,))
            world.acknowledge(lease)


def advantages(world: World, parts: Parts) -> Process[None]:
    """The advantage role of fully async: whole partitions."""
    for k in count():
        columns = (*COLUMNS, "ref_logprobs", "old_logprobs")
        lease = yield from world.take("advantages", columns, world.groups, k, "canonical")
        yield parts.advantages
        world.give(lease, ("advantages",))
        world.acknowledge(lease)


def train(world: World, parts: Parts, setting: Setting, pushes: Pushes) -> Process[None]:
    """The actor of fully async."""
    for k in count():
        columns = (*COLUMNS, "ref_logprobs", "old_logprobs", "advantages")
        lease = yield from world.take("train", columns, world.groups, k, "canonical")
        world.acknowledge(lease)
        world.seal(k)
        yield parts.train / setting.actor
        world.retire(k, lease.tickets)
        yield from push_behind(world, parts, pushes, k + 1)
