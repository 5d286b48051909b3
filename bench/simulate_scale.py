"""What the controller costs at scale: processor time of gate, ledger, dispatch and dealing for 100,000 samples a step.

Hybrid on 1,024 simulated devices (512 rollout engines, 512 train ranks) under a simulated clock, which is not counted:

``gate``      admission of every ticket, every refusal, acknowledgement of every version by every engine
``ledger``    assign, put, drop, take, acknowledge, seal, retire, and the accounts checked every step
``dispatch``  the random seed of every sample
``dealing``   the rows of every rank, balanced, for the forwards of each sub-batch and for the train call

Some groups are dropped and drawn again; every sample is accounted for. Run from the project's folder:
``python -m bench.simulate_scale [--json]``.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.simulate import Shape, lognormal
from bench.simulate_clock import Process
from bench.simulate_loops import COLUMNS, Pushes, push_behind
from bench.simulate_world import Meter, Rollouts, World
from tandem.base.seeding import derive_seed
from tandem.dataflow.tickets import Ticket
from tandem.speed.step_bound import Parts
from tandem.train.shard_batch import shard_rows

PARTS = Parts(rollout=0.0, train=2000.0, reference=400.0, advantages=0.05, snapshot=0.2, broadcast=1.0, swap=0.1)
SAMPLES, SUB_BATCHES, SLOTS, STALENESS = 8, 10, 8, 1
FULL = 12_500  # groups


@dataclass(frozen=True)
class Scale:
    """A size of the run."""

    devices: int
    groups: int

    @property
    def ranks(self) -> int:
        """Train ranks; as many rollout engines."""
        return self.devices // 2


def refused(ticket: Ticket) -> bool:
    """One group in a hundred is dropped the first time."""
    return ticket.attempt == 0 and (ticket.place + ticket.partition) % 100 == 0


def run(scale: Scale, steps: int) -> dict[str, Any]:
    """Cost per step after the first two, and memory after each step."""
    meter = Meter()
    shape = Shape("scale", PARTS, lognormal(1.0, 0.5, 4.0), scale.groups, SAMPLES, SLOTS)
    rollouts = Rollouts(scale.ranks, shape.slots, shape.duration, refused=refused)
    world = World(scale.groups, SAMPLES, STALENESS, rollouts, meter)
    world.clock.spawn(_train(world, scale))
    world.start()
    costs, objects, resident = [], [], []
    for step in range(1, steps + 1):
        before = dict(meter.seconds)
        world.run(step)
        costs.append({name: seconds - before.get(name, 0.0) for name, seconds in meter.seconds.items()})
        gc.collect()
        objects.append(len(gc.get_objects()))
        resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    accounts = world.ledger.accounts()
    accounts.check()
    assert accounts.trained == steps * scale.groups * SAMPLES
    counted = costs[2:]
    cost = {name: sum(row[name] for row in counted) / len(counted) for name in counted[0]}
    return {
        "devices": scale.devices,
        "samples": scale.groups * SAMPLES,
        "cost": cost,
        "seconds": sum(cost.values()),
        "objects": objects,
        "peak_kib": resident,
        "accounts": vars(accounts),
        "largest_lag": max(world.lags),
    }


def _train(world: World, scale: Scale) -> Process[None]:
    """The hybrid loop with its dealing; generation and training take simulated time only."""
    pushes = Pushes.of(world)
    random = np.random.default_rng(0)
    share, k = scale.groups // SUB_BATCHES, 0
    while True:
        lengths: list[int] = []
        tickets: list[Ticket] = []
        for _ in range(SUB_BATCHES):
            lease = yield from world.take("train", COLUMNS, share, k, "arrival")
            drawn = np.minimum(8192, random.lognormal(6.0, 1.0, share * SAMPLES)).astype(int).tolist()
            with world.meter.timed("dispatch"):
                for ticket in lease.tickets:
                    for index in range(SAMPLES):
                        derive_seed(0, "sample", *ticket, index)
            with world.meter.timed("dealing"):
                shard_rows(drawn, scale.ranks, balance=True)
            yield PARTS.forward / scale.ranks / SUB_BATCHES
            world.acknowledge(lease)
            lengths += drawn
            tickets += lease.tickets
        world.seal(k)
        with world.meter.timed("dealing"):
            dealt = shard_rows(lengths, scale.ranks, balance=True)
        assert sum(map(len, dealt)) == scale.groups * SAMPLES
        yield PARTS.train / scale.ranks + PARTS.advantages
        world.retire(k, tickets)
        k += 1
        yield from push_behind(world, PARTS, pushes, k)


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table, a row a size."""
    names = list(rows[0]["cost"])
    lines = [f"| devices | samples | {' | '.join(names)} | sum, s per step | µs per sample |"]
    lines.append("|---" * (len(names) + 4) + "|")
    for row in rows:
        parts = " | ".join(f"{row['cost'][name]:.3f}" for name in names)
        each = 1e6 * row["seconds"] / row["samples"]
        lines.append(f"| {row['devices']} | {row['samples']} | {parts} | {row['seconds']:.3f} | {each:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    sizes = [Scale(1024, FULL // 8 // SUB_BATCHES * SUB_BATCHES), Scale(1024, FULL // 2), Scale(1024, FULL)]
    sizes.append(Scale(256, FULL))
    rows = [run(size, args.steps) for size in sizes]
    print(json.dumps(rows, indent=2) if args.json else table(rows))
    if not args.json:
        for row in rows:
            print(
                f"{row['devices']} devices, {row['samples']} samples: Python objects after each step {row['objects']}"
            )
            print(f"  peak memory, KiB: {row['peak_kib']}; {row['accounts']}")


if __name__ == "__main__":
    main()
