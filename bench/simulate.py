"""How much of the best possible step the gate and the ledger let each mode reach, with fake engines of fixed durations.

Five shapes of work, on 16 simulated devices, run under a simulated clock through the real gate and the real ledger; the
loops consume, produce and wait as the real ones do. The limits are those of ``tandem.speed.step_bound``. Steps after
the first few are timed. Run from the project's folder: ``python -m bench.simulate [--json] [--steps 40]``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.simulate_loops import start
from bench.simulate_world import Meter, Rollouts, World
from tandem.dataflow.tickets import Ticket
from tandem.speed.step_bound import Parts, Setting, best_step, perfect_step

DEVICES = 16
HYBRID = Setting("hybrid", rollout=8, actor=8)
FULLY_ASYNC = Setting("fully_async", rollout=8, actor=4, reference=2, actor_fwd=2, sub_batches=8, overlap=True)
WARM_UP = 8


@dataclass(frozen=True)
class Shape:
    """A kind of work: ``parts`` of a step (their ``rollout`` and ``longest`` follow from the groups) and its groups."""

    name: str
    parts: Parts
    duration: Callable[[Ticket], float]
    groups: int = 256
    samples: int = 8
    slots: int = 4

    def measured(self, steps: int) -> Parts:
        """The parts with the rollout work that all groups of a step are, on average."""
        durations = [self.duration(Ticket(k, place)) for k in range(steps) for place in range(self.groups)]
        return replace(self.parts, rollout=sum(durations) / self.slots / steps, longest=max(durations))


def fixed(seconds: float) -> Callable[[Ticket], float]:
    """All groups take the same time."""
    return lambda ticket: seconds


def lognormal(median: float, sigma: float, longest: float) -> Callable[[Ticket], float]:
    """Few groups take long; each step has one of the ``longest``."""

    def duration(ticket: Ticket) -> float:
        if ticket.place == 0:
            return longest
        drawn = random.Random(f"{ticket.partition} {ticket.place} {ticket.attempt}").gauss(0.0, sigma)
        return min(longest, median * math.exp(drawn))

    return duration


PARTS = Parts(rollout=0.0, train=30.0, advantages=0.05, turns=0.5, push=0.6, snapshot=0.1, broadcast=0.8, swap=0.1)
LARGE_PUSH = replace(PARTS, push=5.0, broadcast=9.0, swap=0.3)
SHAPES = (
    Shape("rollout-bound", replace(PARTS, train=24.0, reference=6.0, old=6.0), fixed(1.0)),
    Shape("train-bound", replace(PARTS, train=48.0, reference=16.0, old=12.0), fixed(0.5)),
    Shape("balanced", replace(PARTS, train=40.0, reference=12.0, old=10.0), fixed(1.0)),
    Shape("long tail", replace(PARTS, train=24.0, reference=8.0, old=6.0), lognormal(1.0, 1.0, longest=12.0), slots=32),
    Shape("large push", replace(LARGE_PUSH, train=30.0, reference=8.0, old=8.0), fixed(1.0)),
)


def settings() -> Iterator[Setting]:
    """Every mode, with what can be chosen in it."""
    yield Setting("colocate", rollout=DEVICES)
    for m in (1, 8):
        sliced = replace(HYBRID, sub_batches=m)
        yield sliced
        yield replace(sliced, pipelined=True)
        for s in (1, 2):
            yield replace(sliced, staleness=s)
            yield replace(sliced, staleness=s, overlap=True)
            yield replace(sliced, staleness=s, overlap=True, pipelined=True)
            yield replace(sliced, staleness=s, overlap=True, drains=True, at_once=True)
    for s in (0, 1, 2):
        yield replace(FULLY_ASYNC, staleness=s)


def run(shape: Shape, setting: Setting, steps: int) -> dict[str, Any]:
    """One simulated run: its mean step after the warm-up, against the limit."""
    rollouts = Rollouts(setting.rollout, shape.slots, shape.duration, setting.drains)
    world = World(shape.groups, shape.samples, setting.staleness, rollouts, Meter())
    world.start()
    parts = shape.measured(steps)
    start(world, parts, setting)
    world.run(steps)
    rounds = (steps - 1 - WARM_UP) // (setting.staleness + 1)  # s + 1 steps are alike, one alone may not be
    timed = rounds * (setting.staleness + 1)
    step = (world.ended[-1] - world.ended[-1 - timed]) / timed
    limit = best_step(parts, setting)
    world.ledger.accounts().check()
    assert world.ledger.accounts().trained == steps * shape.groups * shape.samples
    return {
        "shape": shape.name,
        "setting": asdict(setting),
        "name": name_of(setting),
        "timed": timed,
        "step": step,
        "limit": limit.seconds,
        "fraction": limit.seconds / step,
        "bound": str(limit.bound),
        "of_perfect": perfect_step(parts, setting.devices) / step,
        "largest_lag": max(world.lags),
    }


def name_of(setting: Setting) -> str:
    """A setting in a few words."""
    flags = [name for name in ("overlap", "pipelined", "drains") if getattr(setting, name)]
    if setting.mode == "colocate":
        return "colocate"
    return " ".join([setting.mode, f"s={setting.staleness}", f"m={setting.sub_batches}", *flags])


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table: settings down, shapes across; in each cell the fraction and what binds."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    cells = {(row["name"], row["shape"]): f"{row['fraction']:.3f} {row['bound']}" for row in rows}
    lines = [f"| setting | {' | '.join(shapes)} |", "|---" * (len(shapes) + 1) + "|"]
    for name in dict.fromkeys(row["name"] for row in rows):
        lines.append(f"| {name} | {' | '.join(cells.get((name, shape), '') for shape in shapes)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    rows = [run(shape, setting, args.steps) for shape in SHAPES for setting in settings()]
    print(json.dumps(rows, indent=2) if args.json else table(rows))


if __name__ == "__main__":
    main()
