"""Settings of every test: one thread, no network, repeatable property tests."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

# Before anything imports torch: two OpenMP threads per process on a busy machine multiply every time.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
# Rich output of the command line must not depend on the terminal that runs the tests.
os.environ["COLUMNS"] = "120"

import pytest
from hypothesis import HealthCheck, settings

from tandem.base.exact_mode import ask_for_exact_mode
from tests.house.long_marks import SEEN, seen_in
from tests.warm.start import note_environment, warm_engines, warm_python

__all__ = ["warm_engines", "warm_python"]

ON_RAY = "tests/ray/"

# `trainer.exact` refuses a process that has computed in another mode, and all tests share one.
ask_for_exact_mode()
note_environment()

# Imports leave no garbage behind, and looking for it among their objects takes a seventh of their time.
gc.disable()

# The background jobs of a shell ignore SIGINT, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `pytest --hypothesis-profile=explore` looks for new inputs; the default always tries the same ones.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes the tests on Ray come first: they are the longest that one process does alone."""
    config.stash[SEEN] = seen_in(items)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(ON_RAY))


def pytest_collection_finish() -> None:
    """What is there now stays to the end, so it is never looked through for garbage."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests that wait leave theirs to others. More than four only wait for memory."""
    return min(4, 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay with one process, which builds once what they share; those on Ray share one cluster."""
    from xdist.scheduler import LoadFileScheduling

    class WithOneCluster(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return ON_RAY if nodeid.startswith(ON_RAY) else str(super()._split_scope(nodeid))

    return WithOneCluster(config, log) if config.getoption("dist") == "loadfile" else None
