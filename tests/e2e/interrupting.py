"""A signal at a chosen instant of a command, in this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cli.app import app
from tandem.models.fingerprint import fingerprint
from tandem.models.loading import load_model

CODES = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}

Instant = tuple[Any, str, int, int]
"""Owner and name of a function, at which of its calls the signal comes, steps that are saved afterwards."""


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def trained(output: Path) -> str:
    return fingerprint(load_model(output / "final").named_parameters())


def interrupted_at(instant: Instant, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes as the function begins; it is heard before the function goes on, unless it is held back."""
    owner, name, count, _ = instant
    inner: Callable[..., Any] = getattr(owner, name)
    left = [count]

    @wraps(inner)
    def outer(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), number)
        return inner(*arguments, **options)

    monkeypatch.setattr(owner, name, outer)
