"""How busy an engine stays whose episodes wait for tools, against the same episodes with tools that take no time.

The real groups of episodes ask a fake engine with ``SLOTS`` places, where a token takes 20 ms whatever else it makes.
After each turn a tool takes a lognormal time of 0 to 3 s. So many groups of ``N`` episodes are under way at a time, as
tickets let them; another begins when all of one have ended. The clock is simulated, and what is compared are the shares
of the places that were busy until the last group had begun: afterwards no engine could be full. Run from the project's
folder: ``python -m bench.simulate_tools [--json]``.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from tandem.data.prompts import Prompt
from tandem.episodes.policy import Task
from tandem.episodes.process.pool import Asks, Ended, EpisodePool, Listener
from tandem.reward.outcome import Verdict
from tandem.roles.rollout.episodes import EpisodeGroups
from tandem.roles.rollout.making import Beginning, make_groups
from tandem.roles.rollout.talk import EpisodeRules
from tandem.rollout.protocol import GroupOutput, GroupRequest, RolloutEngine, SampleOutput, Sampling

SLOTS, N, TURNS, GROUPS = 64, 8, 3, 96
UNDER_WAY = (8, 16, 24, 32)
"""Groups under way at a time: 1 to 4 episodes for each place."""
TOKEN_S = 0.02
TOOL_MEDIAN_S, TOOL_SIGMA, TOOL_MOST_S = 0.8, 1.0, 3.0
LENGTHS = (40, 0.6, 200)
"""Median, sigma and most tokens of a turn."""


@dataclass
class World:
    """The clock, and what will happen on it."""

    now: float = 0.0
    busy_s: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=itertools.count)

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Have something done so many seconds from now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), do))

    def step(self, busy: int) -> None:
        """Let the next thing happen, while so many places are busy."""
        when, _, do = heapq.heappop(self._events)
        self.busy_s += busy * (when - self.now)
        self.now = when
        do()


class Tools:
    """What ``EpisodePool`` does, for episodes of ``TURNS`` turns with a tool between them that takes its time."""

    def __init__(self, world: World, takes: bool) -> None:
        self._world, self._takes = world, takes
        self._numbers = itertools.count()
        self._plays: dict[str, tuple[Task, Listener, list[int]]] = {}

    def number(self) -> int:
        """Return a number that nobody had before."""
        return next(self._numbers)

    def begin(self, name: str, task: Task, listener: Listener) -> None:
        """Ask for the first turn at once."""
        self._plays[name] = task, listener, list(task.prompt_ids)
        self._ask(name)

    def answer(self, name: str, number: int, reply: Mapping[str, Any]) -> None:
        """Run the tool, or end."""
        del number
        task, _, ids = self._plays[name]
        ids += [*reply["token_ids"], 1]
        turn = reply["details"]["turn"]
        chance = random.Random(f"{task.seed} {turn}")
        seconds = min(TOOL_MOST_S, TOOL_MEDIAN_S * chance.lognormvariate(0.0, TOOL_SIGMA)) if self._takes else 0.0
        self._world.after(seconds, lambda: self._end(name) if turn == TURNS else self._ask(name))

    def check(self) -> None:
        """Nothing breaks here."""

    def cancel(self, name: str) -> None:
        """Nobody is cancelled here."""

    def _ask(self, name: str) -> None:
        _, listener, ids = self._plays[name]
        listener.put(Asks(name, self.number(), {"op": "generate", "token_ids": list(ids)}))

    def _end(self, name: str) -> None:
        _, listener, _ = self._plays.pop(name)
        listener.put(Ended(name, Verdict(1.0), {}, 0.0))


class Groups(EpisodeGroups):
    """Waits by letting the clock go on."""

    world: World

    def wait(self, seconds: float) -> None:
        """Let the next thing happen; the engine has nothing to do."""
        del seconds
        self.world.step(busy=0)


class Engine:
    """Makes a token every ``TOKEN_S`` for up to ``SLOTS`` samples."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ended: list[GroupOutput] = []
        self._running = 0

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        """See ``RolloutEngine``."""
        source, more = iter(requests), True
        while more or self._running or self._ended:
            while more and self._running < SLOTS:
                request = next(source, "end")
                more = request != "end"
                if not isinstance(request, GroupRequest):
                    break
                self._begin(request, sampling)
            if self._ended:
                yield self._ended.pop(0)
            elif self._running:
                self._world.step(self._running)

    def _begin(self, request: GroupRequest, sampling: Sampling) -> None:
        median, sigma, most = LENGTHS
        length = int(min(most, 1 + median * random.Random(request.seeds[0]).lognormvariate(0.0, sigma)))
        length = min(length, request.limit(sampling))
        self._running += 1

        def end() -> None:
            self._running -= 1
            ids = torch.ones(length, dtype=torch.int64)
            columns = ids, torch.zeros(length), torch.zeros(length, dtype=torch.int32)
            self._ended.append(GroupOutput(request, (SampleOutput(*columns, "stop"),)))

        self._world.after(length * TOKEN_S, end)


class _Letters:
    def decode(self, ids: Any, **_: Any) -> str:
        return "." * len(ids)

    def __len__(self) -> int:
        return 2


@dataclass(frozen=True)
class Found:
    """The share of the places that was busy, sampled tokens, and the seconds of all of it."""

    utilization: float
    tokens: int
    seconds: float


def measure(*, tools: bool, at_a_time: int, count: int = GROUPS) -> Found:
    """Play the episodes of ``count`` groups, so many at a time."""
    world = World()
    pool = cast("EpisodePool", Tools(world, tools))
    sampling = Sampling(n=N, max_tokens=4096, stop_token_ids=(0,))
    groups = Groups(pool, EpisodeRules(TURNS, 100, None, None), sampling, _Letters())
    groups.world = world
    left, under_way, full = count, 0, (0.0, 0.0)

    def begin() -> bool:
        nonlocal left, under_way, full
        if not left or under_way == at_a_time:
            return False
        number, left, under_way = left, left - 1, under_way + 1
        groups.begin(Beginning(str(number), Prompt(str(number), (1, 1), ".."), number, (0, "bench")))
        full = (world.busy_s, world.now)
        return True

    sampled = 0
    for made in make_groups(cast("RolloutEngine", Engine(world)), groups, begin):
        under_way -= 1
        sampled += int(made.batch.ragged("response_mask").values.sum())
    return Found(full[0] / (SLOTS * full[1]), sampled, world.now)


def rows() -> list[dict[str, float]]:
    """Measure with and without tools, by how many are under way."""
    found = []
    for at_a_time in UNDER_WAY:
        without, with_tools = (measure(tools=tools, at_a_time=at_a_time) for tools in (False, True))
        if without.tokens != with_tools.tokens:
            raise AssertionError(f"{without.tokens} tokens without tools, {with_tools.tokens} with them")
        ratio = with_tools.utilization / without.utilization
        shares = {"without_tools": without.utilization, "with_tools": with_tools.utilization, "ratio": ratio}
        found.append({"episodes_per_place": at_a_time * N / SLOTS, "tokens": without.tokens, **shares})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    found = rows()
    if args.json:
        print(json.dumps(found))
        return
    print("episodes per place   tokens   busy without tools   with   ratio")
    for row in found:
        shares = f"{row['without_tools']:18.3f} {row['with_tools']:6.3f} {row['ratio']:7.3f}"
        print(f"{row['episodes_per_place']:18.0f} {row['tokens']:8.0f} {shares}")


if __name__ == "__main__":
    main()
