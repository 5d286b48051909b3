"""What a run says of itself beside its numbers: when, where and by which command it began, and how it ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from tandem.base.folders import flush
from tandem.base.hidden import hide, hide_words
from tandem.base.interrupts import requested
from tandem.base.machine import process_lives
from tandem.base.run_folder import ABOUT_FILE, METRICS_FILE
from tandem.observe.metrics import from_json

PACKAGES = ("tandem-rl", "torch", "transformers", "vllm", "ray")
QUIET_S = 600.0
"""A run on another machine that has written nothing for so long is taken for dead."""

OUTCOMES = ("finished", "failed", "interrupted")
"""Ends that a run notes."""

_GIT_S = 5.0
_PIDS = 1 << 31  # ids of processes are less


@dataclass(frozen=True)
class State:
    """How a run stands, and what is known of its end."""

    kind: Literal["running", "finished", "failed", "interrupted", "died", "unknown"]
    words: str


def note_begin(folder: Path, resumed_step: int | None) -> None:
    """Note a start in ``folder``; starts before it stay in the list."""
    starts = starts_in(read_about(folder)) if resumed_step is not None else []
    start = {
        "began": _now(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": hide_words([_program(), *sys.argv[1:]]),
        "folder": os.getcwd(),
        "commit": _commit(os.getcwd()),
        "python": sys.version.split()[0],
        "versions": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "resumed_step": resumed_step,
    }
    _write(folder, {"starts": [*starts, start]})


def outcome_of(error: BaseException | None) -> tuple[Literal["finished", "failed", "interrupted"], str]:
    """Return how a run ended that ``error`` has ended (None: it did all), and why in words without secrets."""
    if error is None:
        return "finished", ""
    if requested() is not None or isinstance(error, KeyboardInterrupt):
        return "interrupted", "by a signal"
    return "failed", hide(f"{type(error).__name__}: {error}")


def note_end(folder: Path, error: BaseException | None) -> None:
    """Note how the run in ``folder`` ended."""
    about = read_about(folder)
    outcome, words = outcome_of(error)
    _write(folder, {**about, "ended": {"at": _now(), "outcome": outcome, "words": words}})


def read_about(folder: Path) -> dict[str, Any]:
    """Read what the run in ``folder`` noted; nothing where it is older than such notes, or they can't be read."""
    try:
        found = from_json((folder / ABOUT_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def starts_in(about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the starts in ``about``, whatever else stands among them."""
    found = about.get("starts")
    return [start for start in found if isinstance(start, dict)] if isinstance(found, list) else []


def state_of(folder: Path, about: Mapping[str, Any]) -> State:
    """Say how the run in ``folder`` stands, which noted ``about``; unknown where that isn't as runs write it."""
    if ended := about.get("ended"):
        if not isinstance(ended, dict) or ended.get("outcome") not in OUTCOMES:
            return State("unknown", f"what {ABOUT_FILE} says of its end can't be read")
        return State(ended["outcome"], f"{ended.get('at', '')} {ended.get('words', '')}".strip())
    starts = starts_in(about)
    if not starts:
        return State("unknown", "it left no note of its start")
    host, pid = starts[-1].get("host"), starts[-1].get("pid")
    if not isinstance(host, str) or not isinstance(pid, int) or not 0 < pid < _PIDS:
        return State("unknown", f"what {ABOUT_FILE} says of its start can't be read")
    process = f"process {pid} on {host}"
    if process_lives(pid) if host == socket.gethostname() else _written_s(folder) < QUIET_S:
        return State("running", process)
    return State("died", f"{process} is gone and left no word: killed, or out of memory")


def _program() -> str:
    """Return the command's name; ``python -m tandem`` has it too."""
    name = Path(sys.argv[0]).name
    return "tandem" if name == "__main__.py" else name


def _written_s(folder: Path) -> float:
    """Return the seconds since the run wrote a step, or began."""
    times = [path.stat().st_mtime for name in (METRICS_FILE, ABOUT_FILE) if (path := folder / name).exists()]
    return time.time() - max(times, default=0.0)


@cache
def _commit(folder: str) -> str | None:
    """Return the commit that ``folder`` had when this process first asked, with ``+`` where files differed from it."""
    try:
        answers = [
            subprocess.run(
                ["git", *words], cwd=folder, capture_output=True, text=True, timeout=_GIT_S, check=True
            ).stdout.strip()
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return answers[0] + ("+" if answers[1] else "")


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(" ", "seconds")


def _write(folder: Path, about: Mapping[str, Any]) -> None:
    path = folder / ABOUT_FILE
    beside = path.with_name(ABOUT_FILE + ".partial")
    beside.write_text(json.dumps(about, indent=1), "utf-8")
    flush(beside)
    os.replace(beside, path)
