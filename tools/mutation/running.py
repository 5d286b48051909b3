"""Runs tests in forks of a process that has torch, pytest and all other libraries loaded, but nothing of Tandem's.

A fork imports Tandem anew, with one module of ``tandem.algorithms`` replaced by a mutant of it, and runs the tests that
reach the mutated lines, the fastest first, up to the first failure.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any

from tools.mutation.mutants import MUTATED, ROOT, Mutant

PACKAGE = "tandem.algorithms"
OWN = ("tandem", "tests", "__main__", "tools")
FLAGS = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:terminalreporter", "--hypothesis-profile=mutation"]
MEMORY = 4 << 30
"""What a mutant may allocate beyond what is loaded: an endless loop fills memory faster than time."""

SECONDS = 15.0
"""Processor time of the tests that are tried on one mutant."""

IMPORTED = 0
"""In place of a line: run by the import itself."""


@dataclass(frozen=True)
class Reach:
    """What a test runs: its processor seconds, and the lines of the mutated package by file."""

    test: str
    seconds: float
    lines: dict[str, list[int]]

    def runs(self, mutant: Mutant) -> bool:
        """Whether the mutated statement is among the lines, or the import runs it.

        A default can also be read from the signature, by a test that runs nothing of the package.
        """
        if mutant.first == IMPORTED or (mutant.line < mutant.first and not self.lines):
            return True
        return any(mutant.first <= line <= mutant.last for line in self.lines.get(mutant.file, []))


def in_fork(work: Callable[[], object], seconds: float | None = None) -> tuple[int, int]:
    """Start ``work`` in a fork with a limit of processor time: its pid, and where its pickled result can be read."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.close(reading)
        silence()
        if seconds is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
            resource.setrlimit(resource.RLIMIT_AS, (address_space() + MEMORY,) * 2)
        with os.fdopen(writing, "wb") as answer:
            pickle.dump(work(), answer)
        code = 0
    finally:
        os._exit(code)


def silence() -> None:
    """What pytest prints goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def address_space() -> int:
    """Bytes of address space of this process."""
    with open("/proc/self/statm", encoding="ascii") as pages:
        return int(pages.read().split()[0]) * resource.getpagesize()


def result_of(pid: int, reading: int) -> Any:
    """The result of a fork, None if it ended without one."""
    with os.fdopen(reading, "rb") as answer:
        content = answer.read()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return pickle.loads(content) if content else None


def warm_up(tests: Sequence[str]) -> None:
    """Import what the tests import of other packages, and the layers of Tandem below the mutated one."""
    import hypothesis

    once = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    slow = list(hypothesis.HealthCheck)
    hypothesis.settings.register_profile(
        "mutation", derandomize=True, deadline=None, max_examples=50, phases=once, suppress_health_check=slow
    )

    def loaded_by_tests() -> list[str]:
        run_pytest([*tests, "--collect-only"], [])
        return list(sys.modules)

    for name in result_of(*in_fork(loaded_by_tests)) or []:
        if name.split(".")[0] not in OWN or name.startswith(("tandem.base", "tandem.config")):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    if PACKAGE in sys.modules:
        raise RuntimeError(f"{PACKAGE} is loaded before it is mutated: a layer below it imports it")


def run_pytest(arguments: Sequence[str], plugins: list[object]) -> int:
    """pytest's exit code."""
    import pytest

    return int(pytest.main([*FLAGS, *arguments], plugins=plugins))


class Recorder:
    """A pytest plugin that notes which lines of the mutated package each test runs, and how long it takes."""

    def __init__(self) -> None:
        self.reaches: list[Reach] = []
        self.failed: list[str] = []
        self._lines: dict[str, set[int]] = {}

    def _enter(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        return self._line if frame.f_code.co_filename.startswith(str(MUTATED)) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        self._lines.setdefault(os.path.basename(frame.f_code.co_filename), set()).add(frame.f_lineno)
        return self._line

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> None:
        """Start anew for each test."""
        self._lines = {}

    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool:
        """Run the test under a trace."""
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        start = time.process_time()
        sys.settrace(self._enter)
        try:
            pyfuncitem.obj(**arguments)
        finally:
            sys.settrace(None)
            seconds = time.process_time() - start
            lines = {file: sorted(lines) for file, lines in self._lines.items()}
            self.reaches.append(Reach(pyfuncitem.nodeid, seconds, lines))
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note what fails without any mutation."""
        if report.failed:
            self.failed.append(report.nodeid)


class Chosen:
    """A pytest plugin that runs the given tests in the given order and notes the first that fails."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.tests = tests
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Reorder, leave out."""
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[test] for test in self.tests if test in by_name]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note the failure."""
        if report.failed and not self.failed:
            self.failed = report.nodeid


class MutantFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module in a syntax tree instead of its file."""

    def __init__(self, module: str, tree: ast.Module, path: str) -> None:
        self.module, self.path = module, path
        self.code: CodeType = compile(tree, path, "exec")

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """The mutant, if it is asked for."""
        return importlib.util.spec_from_loader(name, self, origin=self.path) if name == self.module else None

    def exec_module(self, module: ModuleType) -> None:
        """Run the mutant's code."""
        module.__file__ = self.path
        exec(self.code, module.__dict__)


def measured(tests: Sequence[str], extra: Sequence[str]) -> list[Reach]:
    """What each test of the files ``tests`` runs. Raises ``RuntimeError`` if one fails without a mutation."""

    def work() -> tuple[list[Reach], list[str], int]:
        recorder = Recorder()
        code = run_pytest([*tests, *extra], [recorder])
        return recorder.reaches, recorder.failed, code

    found = result_of(*in_fork(work))
    if found is None or found[2] != 0:
        raise RuntimeError(f"the tests do not pass without a mutation: {found and found[1:]}")
    return list(found[0])


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: ``killed`` by a test (its name) or by a limit, or not."""

    mutant: Mutant
    killed: bool
    by: str


def judged(
    mutants: Sequence[Mutant], reaches: Sequence[Reach], extra: Sequence[str], processes: int
) -> Iterator[Verdict]:
    """A verdict for each mutant, as they come in, from ``processes`` forks at a time."""
    running: dict[int, tuple[Mutant, int]] = {}
    waiting = list(reversed(mutants))
    while waiting or running:
        while waiting and len(running) < processes:
            mutant = waiting.pop()
            # What no test runs is run by an import, if at all: any test may see that.
            chosen = fastest(reach for reach in reaches if reach.runs(mutant)) or fastest(reaches)
            pid, reading = start(mutant, chosen, extra)
            running[pid] = (mutant, reading)
        pid, status = os.wait()
        mutant, reading = running.pop(pid)
        yield verdict(mutant, status, result_of(pid, reading))


def fastest(reaches: Iterable[Reach]) -> list[Reach]:
    """The fastest of the tests, as many as fit into the time for one mutant."""
    chosen: list[Reach] = []
    seconds = 0.0
    for reach in sorted(reaches, key=lambda reach: reach.seconds):
        seconds += reach.seconds
        if chosen and seconds > SECONDS:
            break
        chosen.append(reach)
    return chosen


def start(mutant: Mutant, chosen: Sequence[Reach], extra: Sequence[str]) -> tuple[int, int]:
    """A fork that runs the chosen tests on the mutant, up to the first failure."""

    def work() -> tuple[int, str]:
        path = MUTATED / mutant.file
        finder = MutantFinder(f"{PACKAGE}.{path.stem}", mutant.tree(), str(path))
        sys.meta_path.insert(0, finder)
        files = dict.fromkeys(reach.test.split("::")[0] for reach in chosen)
        plugin = Chosen([reach.test for reach in chosen])
        code = run_pytest([*(str(ROOT / file) for file in files), *extra], [plugin])
        return code, plugin.failed

    return in_fork(work, seconds=20 + 5 * sum(reach.seconds for reach in chosen))


def verdict(mutant: Mutant, status: int, answer: tuple[int, str] | None) -> Verdict:
    """From how a fork ended to what that says."""
    if answer is None:
        limit = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
        return Verdict(mutant, True, "the limit of processor time" if limit else "the end of the process")
    code, failed = answer
    return Verdict(mutant, code != 0, failed or ("an error on import" if code else ""))


def as_json(reaches: Iterable[Reach]) -> str:
    """For a file."""
    return json.dumps([[reach.test, reach.seconds, reach.lines] for reach in reaches])


def from_json(text: str) -> list[Reach]:
    """From such a file."""
    return [Reach(*row) for row in json.loads(text)]
