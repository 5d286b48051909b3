"""What a bench prints: a table of its rows, or JSON where it is asked for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence


def show(description: str | None, rows: Callable[[], Sequence[Mapping[str, float]]]) -> None:
    """Read the command line, then measure ``rows``, at least one and all with the same names, and print them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    found = rows()
    if args.json:
        print(json.dumps(found, indent=2))
        return
    print("| " + " | ".join(found[0]) + " |\n" + "|---" * len(found[0]) + "|")
    for row in found:
        print("| " + " | ".join(str(round(value, 3)) for value in row.values()) + " |")
