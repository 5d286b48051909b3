"""``tandem export``: a trained model is written to a folder of its own."""

from __future__ import annotations

from pathlib import Path

from tandem.control.entry import quiet
from tandem.session.keep.exports import copy_model


def run_export(saved: Path, out: Path, adapter: bool | None = None) -> int:
    """Copy the model of a checkpoint, or of a finished run, to a folder of its own; see ``copy_model``."""
    quiet()
    copy_model(saved, out, adapter)
    print(out)
    return 0
