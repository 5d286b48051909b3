"""Many fake episodes at once, with slow tools, faults and kills: ``python -m tests.chaos.episodes [COUNT]``.

COUNT (2,000) episodes are under way together, three times over, in 4 processes. Each takes 1 to 3 turns with a tool of
0 to 3 s (lognormal) after each; 5 % raise, exit, die, hang or answer nonsense, and processes are killed from outside at
random instants. Every episode must be accounted for, what was well is scored unless its own process was killed, memory
may not grow from round to round, and nothing may be left running.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.reward.outcome import Outcome
from tandem.roles.rollout.making import Made
from tests.episodes.test_groups import made_of, playing, prompt

PLAYS = str(Path(__file__).parents[1] / "episodes" / "plays.py")
COUNT, ROUNDS, KILLS, WORKERS = 2000, 3, 6, 4
FAULTS = {
    "raises": "the wheel came off",
    "exits": "SystemExit",
    "hangs": "outside of the policy",
    "dies": "SIGKILL",
    "nonsense": "not a number",
}
RARE = ("dies",)
"""Each of these costs a process, and the others in it begin anew: one in a thousand is a kill now and then."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Tally:
    """What became of the episodes. ``wrong``: whatever is not as it must be. ``memory``: MB of this process after each
    round.
    """

    ends: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    killed: int = 0
    wrong: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    seconds: float = 0.0


def crowd(
    count: int,
    *,
    faults: Sequence[str] = tuple(FAULTS),
    rounds: int = ROUNDS,
    kills: int = KILLS,
    longest: float = 3.0,
    workers: int = WORKERS,
) -> Tally:
    """Play ``rounds`` of ``count`` episodes, all of a round at once; ``kills`` processes in each."""
    tally, began, dice = Tally(), time.monotonic(), random.Random(5)
    seen: set[int] = set()
    options = {"file": PLAYS, "workers": workers, "concurrency": -(-count // workers)}
    limit = {"timeout_s": 4 * longest, "parameters": {"longest": longest}}
    with playing("errands", lambda text, seed: "is", n=1, **options, **limit) as (groups, engine, made):
        pool = groups._pool
        for number in range(rounds):
            fates = dice.choices([*faults, "well"], [*map(_share, faults), 1 - sum(map(_share, faults))], k=count)
            over = threading.Event()
            killer = threading.Thread(target=_kill, args=(pool, kills, longest, seen, over, tally, number))
            killer.start()
            try:
                prompts = [prompt(made, f"{number} {i}", fate=fate) for i, fate in enumerate(fates)]
                _judge(tally, fates, made_of(groups, engine, prompts))
            finally:
                over.set()
                killer.join()
            engine.asked.clear()
            if groups._plays or groups._asked or groups._ready:
                tally.wrong.append(f"round {number} left {len(groups._plays)} episodes behind")
            gc.collect()
            tally.memory.append(_resident_mb())
        seen |= set(pool.pids)
    tally.wrong += [f"process {pid} is left" for pid in sorted(seen) if _lives(pid)]
    tally.seconds = time.monotonic() - began
    return tally


def _share(fault: str) -> float:
    """Return how many of all episodes have this fault: 5 % have one."""
    return 0.001 if fault in RARE else 0.049 / (len(FAULTS) - len(RARE))


def _judge(tally: Tally, fates: list[str], found: list[Made]) -> None:
    """Count how each episode ended, and note where that isn't as its fate was."""
    if len(found) != len(fates):
        tally.wrong.append(f"{len(fates)} episodes gave {len(found)} groups")
    for fate, group in zip(fates, found, strict=True):
        (verdict,) = group.verdicts
        (facts,) = group.batch.non_tensor_batch["episode"]
        assert verdict is not None
        tally.turns += facts["turns"]
        scored = verdict.outcome is Outcome.SCORED
        tally.ends["scored" if scored else fate if fate != "well" else "killed"] += 1
        wrong = scored if fate != "well" else not scored and "SIGKILL" not in verdict.reason
        reason_is_other = fate != "well" and FAULTS[fate] not in verdict.reason and "SIGKILL" not in verdict.reason
        if wrong or reason_is_other:
            tally.wrong.append(f"one that is {fate} came to {verdict.outcome}: {verdict.reason}")
        if scored and int(group.batch.ragged("response_mask").values.sum()) != 2 * facts["turns"]:
            tally.wrong.append(f"{facts['turns']} turns of 2 tokens gave another mask")


def _kill(
    pool: object, kills: int, longest: float, seen: set[int], over: threading.Event, tally: Tally, number: int
) -> None:
    """Kill processes of the pool, one after the other."""
    dice = random.Random(number)
    for _ in range(kills):
        if over.wait(dice.uniform(0.3, 1.0) * longest):
            return
        pids = pool.pids  # type: ignore[attr-defined]
        seen.update(pids)
        if pids:
            try:
                os.kill(dice.choice(pids), signal.SIGKILL)
                tally.killed += 1
            except ProcessLookupError:
                continue


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / 2**20


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> int:
    """Play, tell; the exit code."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else COUNT
    tally = crowd(count)
    print(f"{count} episodes at once, {ROUNDS} times, in {tally.seconds:.0f} s: {dict(tally.ends)}")
    print(
        f"{tally.turns} turns, {tally.killed} processes killed, MB after each round: {[round(m) for m in tally.memory]}"
    )
    growth = tally.memory[-1] - tally.memory[0]
    if growth > 0.1 * tally.memory[0]:
        tally.wrong.append(f"memory has grown by {growth:.0f} MB")
    print(*tally.wrong[:20], sep="\n")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
