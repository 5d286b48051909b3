"""Strike runs at random instants: ``python -m tests.chaos [COUNT [SEED [KIND...]]]``, COUNT 60.

SIGINT, SIGTERM and SIGKILL hit the command, SIGKILL its engines, scorers and ranks, in all modes, preference training
and fine-tuning. Each run must end as it should, go on from its last whole checkpoint, and train bit for bit what an
undisturbed one trains. Kind ``ray`` (two ranks) is struck only where it is named; it takes half a minute a blow.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path

from tandem.base.exact_mode import ask_for_exact_mode

COUNT = 60


def main() -> int:
    """Draw, strike, compare, tell; the exit code."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    ask_for_exact_mode()
    from tests.chaos.runs import KINDS, Arena, drawn

    count = int(sys.argv[1]) if len(sys.argv) > 1 else COUNT
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    kinds = sys.argv[3:] or [kind for kind in KINDS if kind != "ray"]
    rng, faults, started = random.Random(seed), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena(Path(folder))
        for number in range(count):
            blow = drawn(rng, kinds)
            fault = arena.fault_of(blow, Path(folder) / f"run-{number}")
            faults += fault is not None
            print(f"{number} {blow}: {fault or 'as without it'}", flush=True)
    print(f"{count} blows, {faults} faults, {time.monotonic() - started:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
