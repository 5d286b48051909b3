"""Which small mistakes in ``tandem/algorithms`` would the fast tests notice? ``python -m tools.mutate [OPTIONS]``.

Prints, by file, how many mutants the tests of ``tests/algorithms`` and ``tests/oracle`` kill, and those that survive.
Ends with 1 if less than 95 % of those are killed that are not known as equivalent (``tools/mutation/equivalent.toml``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from tools.mutation.equivalent import equivalents, stale
from tools.mutation.mutants import MUTATED, ROOT, Mutant, even_sample, mutants_of
from tools.mutation.running import Reach, Verdict, as_json, from_json, judged, measured, warm_up

TESTED = ("tests/algorithms", "tests/oracle")
SLOW = frozenset({"test_learning.py"})
CACHE = ROOT / ".mutation_cache"
WANTED = 0.95


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    options = parsed(arguments)
    mutants = [mutant for path in mutated_files(options.files) for mutant in mutants_of(path)]
    known = {entry.name: entry.reason for entry in equivalents()}
    if not options.files and (gone := stale(equivalents(), mutants)):
        print("no longer in the code, remove from equivalent.toml:", *gone, sep="\n  ")
    chosen = [m for m in mutants if not options.names or any(name in m.name for name in options.names)]
    if options.sample:
        chosen = even_sample(chosen, options.sample)
    tried = [mutant for mutant in chosen if mutant.name not in known or options.equivalent]
    print(f"{len(mutants)} mutants, {len(chosen)} chosen, {len(chosen) - len(tried)} of them known as equivalent")
    if options.list:
        print(*(f"{mutant.file}:{mutant.line} [{mutant.kind}] {mutant.name}" for mutant in tried), sep="\n")
        return 0
    extra = ["--oracle", options.oracle] if options.oracle else []
    started = time.time()
    files = [ROOT / name for name in options.tests] or fast_tests()
    verdicts = judge(tried, files, extra, options.processes, options.log)
    print(f"{time.time() - started:.0f} s")
    return report(verdicts, known)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutate", description=__doc__)
    parser.add_argument("--sample", type=int, default=0, help="as many, evenly over files and kinds (default: all)")
    parser.add_argument("--files", nargs="*", default=[], help="only of these files, such as kl.py")
    parser.add_argument("--tests", nargs="*", default=[], help="by these files of tests (default: all fast ones)")
    parser.add_argument("--names", nargs="*", default=[], help="only those with one of these in their name")
    parser.add_argument("--oracle", default="", help="the oracle's cases (default: as the tests find them)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--log", type=Path, help="a line for each verdict; what it says is killed is not tried again")
    parser.add_argument("--equivalent", action="store_true", help="also try those known as equivalent")
    parser.add_argument("--list", action="store_true", help="only print the mutants")
    return parser.parse_args(arguments)


def mutated_files(names: Collection[str]) -> list[Path]:
    """The files of the package, or those of them that are named."""
    return [path for path in sorted(MUTATED.glob("*.py")) if (path.name in names if names else path.stem != "__init__")]


def fast_tests() -> list[Path]:
    """The files of tests that judge."""
    return sorted(path for folder in TESTED for path in (ROOT / folder).glob("test_*.py") if path.name not in SLOW)


def judge(
    mutants: Sequence[Mutant], files: Sequence[Path], extra: Sequence[str], processes: int, log: Path | None
) -> list[Verdict]:
    """The verdicts, with a line for each survivor as it comes in."""
    os.chdir(ROOT)
    warm_up([str(path) for path in files])
    reaches = [reach for path in files for reach in reach_of(path, extra)]
    before = killed_before(log)
    verdicts = [Verdict(mutant, True, before[mutant.name]) for mutant in mutants if mutant.name in before]
    for verdict in judged([m for m in mutants if m.name not in before], reaches, extra, processes):
        verdicts.append(verdict)
        mutant = verdict.mutant
        if log is not None:
            with log.open("a", encoding="utf-8") as lines:
                print(json.dumps([mutant.name, verdict.killed, verdict.by]), file=lines)
        if not verdict.killed:
            print(f"survived: {mutant.file}:{mutant.line} [{mutant.kind}] {mutant.name}  {verdict.by}", flush=True)
    return verdicts


def killed_before(log: Path | None) -> dict[str, str]:
    """The mutants that an interrupted run killed, and what killed them."""
    if log is None or not log.exists():
        return {}
    rows = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    return {name: by for name, killed, by in rows if killed}


def reach_of(path: Path, extra: Sequence[str]) -> list[Reach]:
    """What the tests of a file run; measured again only when they, what they share or the mutated package changed."""
    shared = [
        p for folder in TESTED for p in sorted((ROOT / folder).iterdir()) if p.is_file() and "test_" not in p.name
    ]
    content = b"".join(p.read_bytes() for p in [path, *shared, *sorted(MUTATED.glob("*.py"))])
    kept = CACHE / f"{path.stem}-{hashlib.sha256(content + repr(extra).encode()).hexdigest()[:16]}.json"
    if not kept.exists():
        CACHE.mkdir(exist_ok=True)
        for old in CACHE.glob(f"{path.stem}-*.json"):
            old.unlink()
        kept.write_text(as_json(measured([str(path)], extra)))
    return from_json(kept.read_text())


def report(verdicts: Sequence[Verdict], known: dict[str, str]) -> int:
    """Print the counts by file and kind; 1 if too few are killed."""
    counted: dict[str, Callable[[Mutant], str]] = {"file": lambda m: m.file, "kind": lambda m: m.kind}
    for title, of in counted.items():
        killed = Counter(of(v.mutant) for v in verdicts if v.killed)
        survived = Counter(of(v.mutant) for v in verdicts if not v.killed)
        print(f"{title:<24}{'killed':>8}{'survived':>10}")
        for name in sorted(killed | survived):
            print(f"{name:<24}{killed[name]:>8}{survived[name]:>10}")
    for verdict in verdicts:
        if verdict.killed and verdict.mutant.name in known:
            print(f"not equivalent, for {verdict.by} kills it: {verdict.mutant.name}")
    judged_ones = [verdict for verdict in verdicts if verdict.mutant.name not in known]
    share = sum(verdict.killed for verdict in judged_ones) / max(len(judged_ones), 1)
    print(f"{share:.1%} of {len(judged_ones)} that are not known as equivalent are killed, wanted {WANTED:.0%}")
    return int(share < WANTED)


if __name__ == "__main__":
    sys.exit(main())
