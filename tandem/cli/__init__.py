"""The command line: ``tandem COMMAND``."""

from __future__ import annotations

import signal
import sys

from tandem.base import interrupts

__all__ = ["main"]


def main() -> None:
    """Run the ``tandem`` command. An interrupt while this imports ends without a traceback too.

    Once the command is over, its exit code stands: what ends then is the interpreter.
    """
    interrupts.install()
    try:
        from tandem.cli.app import main as run

        run()
    except interrupts.INTERRUPTS:
        number = interrupts.requested() or signal.SIGINT
        sys.stderr.write(f"{interrupts.WORDS[signal.Signals(number)]}\n")
        sys.exit(128 + number)
    finally:
        interrupts.ignore()
