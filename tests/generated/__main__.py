"""Draw configs, plan each, and run what the plan accepts: ``python -m tests.generated [COUNT [FIRST_SEED]]``.

Prints each config that was accepted and did not run, with as few options as show it, and exits with 1 if there is one.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tandem.base.exact_mode import ask_for_exact_mode

COUNT = 300


def main() -> int:
    """Draw, plan, run, tell; the exit code."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ask_for_exact_mode()  # before anything computes: some of the configs are exact
    from tests.generated.world import make_world

    logging.raiseExceptions = False  # each command has its own stderr, which handlers outlive
    count = int(sys.argv[1]) if len(sys.argv) > 1 else COUNT
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    refused: Counter[str] = Counter()
    faults, started = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stderr(io.StringIO()):
            here = make_world(Path(folder))
        for seed in range(first, first + count):
            fault = tried(here, seed, refused)
            faults += fault is not None
            if fault is not None:
                print(f"seed {seed}: {fault}", flush=True)
    seconds = time.monotonic() - started
    print(f"{count} configs, {faults} faults, {sum(refused.values())} refusals of {len(refused)} keys, {seconds:.0f} s")
    return 1 if faults else 0


def tried(here: Path, seed: int, refused: Counter[str]) -> str | None:
    """The fault of the config of ``seed``, in words; None where there is none."""
    from tests.generated.configs import accepted, draw, fault_of, smallest

    drawn = draw(here, seed)
    try:
        drawn, problems = accepted(drawn)
    except Exception as error:  # whatever a plan raises but ConfigError is what is looked for
        return f"{type(error).__name__}: {error}\n  plan {drawn.words}"
    refused.update(problem.key for problem in problems)
    fault = fault_of(drawn, here)
    if fault is None:
        return None
    options = [word for option in smallest(drawn, here).options for word in option]
    return f"{fault}\n  {drawn.command} {options}"


if __name__ == "__main__":
    raise SystemExit(main())
