"""Settings of every test: one thread, no network, repeatable property tests."""

from __future__ import annotations

import os
import signal

# Before anything imports torch: two OpenMP threads per process on a busy machine multiply every time.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
# Rich output of the command line must not depend on the terminal that runs the tests.
os.environ["COLUMNS"] = "120"

from hypothesis import HealthCheck, settings

from tandem.base.exact_mode import ask_for_exact_mode

# `trainer.exact` refuses a process that has computed in another mode, and all tests share one.
ask_for_exact_mode()

# The background jobs of a shell ignore SIGINT, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `pytest --hypothesis-profile=explore` looks for new inputs; the default always tries the same ones.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")
