"""The command line: ``tandem COMMAND``."""

from tandem.cli.app import main

__all__ = ["main"]
