"""``tandem status``: what a running run answers, in words or for machines."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.observe.status.channel import ask
from tandem.observe.status.status import Status


def status_words(folder: Path, *, as_json: bool, seconds: float) -> str:
    """Return the status of the run in ``folder``. Raises ``DataError`` where none is to be had, ``DeadlineError`` where
    none comes in ``seconds``.
    """
    found = ask(folder, "status", seconds=seconds)
    status = Status.of_json(found)
    return json.dumps(found, indent=1) + "\n" if as_json else "".join(f"{line}\n" for line in status.lines())
