"""``python -m tandem``: the ``tandem`` command."""

from tandem.cli import main

main()
