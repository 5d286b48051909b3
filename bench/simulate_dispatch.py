"""How long a partition takes on several engines, by the order in which its groups are begun.

Groups of lognormal lengths (sigma 1.0) on fake engines of fixed durations, through the real gate and the real ledger.
``longest first`` knows the true lengths, ``by history`` what three earlier epochs showed of them, each with noise;
``as drawn`` gives a group to whoever has room; ``in turns`` deals them to the engines beforehand, one after the other.
Against the bound that no schedule beats: the mean work of a slot, or the longest group. Run from the project's folder:
``python -m bench.simulate_dispatch [--json]``.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from bench.rows import show
from bench.simulate_world import Meter, Rollouts, World
from tandem.dataflow.dispatch import LengthHistory, longest_first

ENGINES, SEEDS, EPOCHS = 4, 20, 3
SIGMA = 1.0
NOISE = 0.5
"""Standard deviation of the logarithm of a length between two epochs: other samples, another policy."""

Order = Callable[[int], Sequence[int]]


@dataclass(frozen=True)
class Partition:
    """``groups`` on engines of ``slots`` each."""

    groups: int
    slots: int


PARTITIONS = (Partition(64, 2), Partition(64, 4), Partition(256, 4), Partition(256, 16))
"""In the last one the longest group alone takes as long as all the work: no order helps much there."""


@dataclass(frozen=True)
class Makespans:
    """Seconds until the last group of a partition is there."""

    bound: float
    longest_first: float
    by_history: float
    as_drawn: float
    in_turns: float


def measure(partition: Partition, seed: int) -> Makespans:
    """Draw lengths and run every schedule on them."""
    chance = random.Random(seed)
    lengths = [chance.lognormvariate(0.0, SIGMA) for _ in range(partition.groups)]
    history = LengthHistory()
    for _ in range(EPOCHS):
        for place, length in enumerate(lengths):
            history.note(place, length * chance.lognormvariate(0.0, NOISE))
    return Makespans(
        bound=max(sum(lengths) / (ENGINES * partition.slots), max(lengths)),
        longest_first=through_the_gate(partition, lengths, ordered(lengths.__getitem__, partition.groups)),
        by_history=through_the_gate(partition, lengths, ordered(history.predicted, partition.groups)),
        as_drawn=through_the_gate(partition, lengths, None),
        in_turns=max(on_one_engine(lengths[engine::ENGINES], partition.slots) for engine in range(ENGINES)),
    )


def ordered(predicted: Callable[..., float | None], groups: int) -> Order:
    """Return the order by what is predicted of each place."""
    return longest_first(predicted, lambda partition, place: place, groups)


def through_the_gate(partition: Partition, lengths: Sequence[float], order: Order | None) -> float:
    """Return when the last group is stored that the gate gave in this order."""
    rollouts = Rollouts(ENGINES, partition.slots, lambda ticket: lengths[ticket.place])
    world = World(partition.groups, 1, 0, rollouts, Meter(), order=order)
    world.start()
    world.clock.run(lambda: len(world.versions) == partition.groups)
    world.ledger.accounts().check()
    return world.clock.now


def on_one_engine(lengths: Sequence[float], slots: int) -> float:
    """Return when the last of an engine's own groups ends, begun as there is room."""
    ends = [0.0] * slots
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def rows() -> list[dict[str, float]]:
    """Measure every partition over all seeds: means and worst cases."""
    found = []
    for partition in PARTITIONS:
        runs = [measure(partition, seed) for seed in range(SEEDS)]
        to_bound = [run.longest_first / run.bound for run in runs]
        to_turns = [run.by_history / run.in_turns for run in runs]
        drawn = [run.by_history / run.as_drawn for run in runs]
        found.append(
            asdict(partition)
            | {
                "longest_first_to_bound": sum(to_bound) / SEEDS,
                "worst_to_bound": max(to_bound),
                "by_history_to_in_turns": sum(to_turns) / SEEDS,
                "worst_to_in_turns": max(to_turns),
                "by_history_to_as_drawn": sum(drawn) / SEEDS,
                "by_history_to_bound": sum(run.by_history / run.bound for run in runs) / SEEDS,
            }
        )
    return found


if __name__ == "__main__":
    show(__doc__, rows)
