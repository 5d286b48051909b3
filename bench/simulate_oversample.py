"""What is gained and what is lost by taking the first groups that are done (``rollout.oversample``).

Groups of lognormal lengths (sigma 1.0) on one engine with slots, each token of each slot a unit of time, through the
real ``Spares``: a group that nobody wants frees its slot at once. Over all seeds: the time until a partition is whole,
against that without spare groups; the tokens made for each that is trained; and the mean length of what is taken,
against the mean of what was asked for, with its true lengths, that of the cancelled groups too. Run from the project's
folder: ``python -m bench.simulate_oversample [--json]``.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from bench.rows import show
from tandem.dataflow.spares import Spares
from tandem.dataflow.tickets import Ticket

GROUPS, SEEDS, SIGMA = 64, 200, 1.0
SPARE = (0, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Filled:
    """A partition that is whole: when, the tokens made for it, the mean lengths taken and asked for."""

    seconds: float
    made: float
    taken: float
    asked: float


def fill(spare: int, slots: int, seed: int) -> Filled:
    """Fill one partition on ``slots``, groups begun in the order of their places."""
    chance = random.Random(seed)
    lengths = [chance.lognormvariate(0.0, SIGMA) for _ in range(GROUPS + max(SPARE))][: GROUPS + spare]
    if spare == 0:
        ends = [0.0] * slots
        for length in lengths:
            heapq.heapreplace(ends, ends[0] + length)
        mean = sum(lengths) / GROUPS
        return Filled(max(ends), sum(lengths), mean, mean)
    spares, waiting = Spares[int](GROUPS, spare), list(range(GROUPS + spare))[::-1]
    running: list[tuple[float, float, int]] = []  # end, begin, place
    taken: list[int] = []
    now = made = 0.0
    while len(taken) < GROUPS:
        while waiting and len(running) < slots:
            place = waiting.pop()
            heapq.heappush(running, (now + lengths[place], now, place))
        now, _, place = heapq.heappop(running)
        made += lengths[place]
        taken += [group for _, group in spares.arrived(Ticket(0, place), place).placed]
    made += sum(now - begun for _, begun, _ in running)
    asked = [lengths[place] for place in range(GROUPS + spare) if place not in waiting]
    return Filled(now, made, sum(lengths[place] for place in taken) / GROUPS, sum(asked) / len(asked))


def rows() -> list[dict[str, float]]:
    """Measure every number of spare groups over all seeds, with room for all groups at once, and for a quarter."""
    found = []
    for slots in (GROUPS + max(SPARE), GROUPS // 4):
        plain = [fill(0, slots, seed) for seed in range(SEEDS)]
        for spare in SPARE:
            runs = [fill(spare, slots, seed) for seed in range(SEEDS)]
            pairs = list(zip(runs, plain, strict=True))
            found.append(
                {
                    "slots": float(slots),
                    "spare": float(spare),
                    "time": sum(run.seconds / whole.seconds for run, whole in pairs) / SEEDS,
                    "made_per_trained": sum(run.made for run in runs) / sum(run.taken * GROUPS for run in runs),
                    "taken_to_asked": sum(run.taken for run in runs) / sum(run.asked for run in runs),
                }
            )
    return found


if __name__ == "__main__":
    show(__doc__, rows)
