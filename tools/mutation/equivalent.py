"""Mutants that no test can kill, since they compute the same: ``equivalent.toml``, each with its reason."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.mutation.mutants import Mutant

LIST = Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True)
class Equivalent:
    """The name of a mutant (``Mutant.name``) and why it is none."""

    name: str
    reason: str


def equivalents(path: Path = LIST) -> list[Equivalent]:
    """The entries of the list, in order."""
    content = tomllib.loads(path.read_text("utf-8"))
    return [
        Equivalent(f"{file} {change}", reason)
        for file, groups in content.items()
        for group in groups
        for change in group["changes"]
        for reason in [group["reason"]]
    ]


def stale(entries: Iterable[Equivalent], mutants: Iterable[Mutant]) -> list[str]:
    """The entries whose code is no longer there."""
    names = {mutant.name for mutant in mutants}
    return [entry.name for entry in entries if entry.name not in names]
